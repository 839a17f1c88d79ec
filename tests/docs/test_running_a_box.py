"""docs/running-a-box.md: its table holds every key of a box config."""

from __future__ import annotations

import re

from gemel.edge_runtime.life import config
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "running-a-box.md").read_text(encoding="utf-8")


def test_table_of_keys_is_that_of_the_config() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", PAGE.partition("## Cameras")[0], re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert keys == vars(config)["_BoxKeys"].model_fields.keys()
