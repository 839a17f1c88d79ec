"""`gemel demo --out`: a folder whose mark or recorded merge is damaged is refused, and stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from gemel.demo import IDENTITY, MERGED, _merged
from merger.events import silent
from models.errors import InputError
from models.workload import Workload
from tests.hostile.damages import damages
from tests.hostile.harness import refused
from tests.hostile.reading.test_json import FILES, make_special

MARKS = {
    "nothing": b"", "garbage": b"\xff\0", "a list": b"[]", "nested": b"[" * 100_000, "another seed": b'{"seed": 7}',
    "a number": b"1" * 5000, "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_a_mark_that_is_none_is_one_line(tmp_path: Path, mark: bytes) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / IDENTITY).write_bytes(mark)
    refused(["demo", "--out", folder], tmp_path, folder)


REPORT = {"bundle": "b", "saved_fraction": 0.5, "ceiling_fraction": 0.6, "queries": [{"id": "a", "met": True}]}


def _read(folder: Path) -> dict[str, object]:
    return _merged(cast(Workload, None), folder, 0, silent)


@pytest.mark.parametrize("what", [*(kind for kind in FILES if kind not in ("missing", "endless")), *MARKS])
def test_a_recorded_merge_that_is_none_is_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / MERGED
    if what in FILES:
        make_special(path, what)
    else:
        path.write_bytes(MARKS[what])
    with pytest.raises(InputError) as refusal:
        _read(tmp_path)
    assert str(refusal.value).startswith(f"{path}: ") and str(refusal.value).endswith("the demo merges again")


def test_whatever_place_of_a_recorded_merge_is_damaged_it_is_refused_or_has_what_is_told(tmp_path: Path) -> None:
    (tmp_path / MERGED).write_text(json.dumps(REPORT))
    assert _read(tmp_path) == REPORT
    refusals = 0
    for what, damaged in damages(REPORT):
        (tmp_path / MERGED).write_text(json.dumps(damaged))
        try:
            found = _read(tmp_path)
            assert isinstance(found["saved_fraction"], int | float) and isinstance(found["queries"], list), what
        except InputError:
            refusals += 1
    assert refusals > 50
