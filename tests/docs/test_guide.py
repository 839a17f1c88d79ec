"""docs/guide.md: its workload is valid, its tasks are those of its table."""

from __future__ import annotations

import re
from pathlib import Path

from gemel.models.workload import load_workload
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "guide.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```yaml file=(\S+)\n(.*?)```", PAGE, re.DOTALL))


def test_guide_workload_is_valid(tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text(FILES["workload.yaml"])
    workload = load_workload(tmp_path / "workload.yaml")
    assert [query.id for query in workload.queries] == ["bridge-vehicles"]


def test_guide_each_task_has_a_section() -> None:
    tasks = re.findall(r"^\| \[(\w+)\]", PAGE, re.MULTILINE)
    parts = [heading.lower() for heading in re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)]
    assert tasks == parts[:13] and len(tasks) == 13
