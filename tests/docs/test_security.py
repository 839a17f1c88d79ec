"""docs/security.md: its limits are those of the code."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([\d,]+)(?: (KiB|MiB|GiB))? \| `([^`]+)\.py` `([^`]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("what", "value", "unit", "file", "name"), ROWS)
def test_limit_in_the_table_is_that_of_the_code(what: str, value: str, unit: str, file: str, name: str) -> None:
    scale = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    module = importlib.import_module("gemel." + file.removeprefix("gemel/").replace("/", "."))
    assert int(value.replace(",", "")) * scale == getattr(module, name), what


def test_table_of_limits_is_read() -> None:
    assert len(ROWS) > 10
