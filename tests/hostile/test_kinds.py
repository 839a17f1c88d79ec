"""Damaged files of every kind: refused in one line, found wanting or accepted, and nothing else changed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.hostile.kinds import KINDS, DamageRunner, draw_case
from tests.parameters import every

FEW, MANY = 4, 15


@pytest.mark.parametrize(
    ("name", "cases"),
    every([(name, count) for name in KINDS for count in (FEW, MANY)], [(name, FEW) for name in KINDS]),
)
def test_damaged_file_is_refused_or_harmless(whole_house: Path, tmp_path: Path, name: str, cases: int) -> None:
    runner = DamageRunner(whole_house, tmp_path / "house")
    for index in range(cases):
        runner.evaluate(draw_case(name, whole_house, Random(f"{name} {cases} {index}")))
