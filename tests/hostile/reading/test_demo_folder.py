"""`gemel demo --out`: a folder whose mark is damaged is refused, and stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemel.demo import IDENTITY
from tests.hostile.harness import refused

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
