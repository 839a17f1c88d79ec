"""Damaged files of every kind: refused in one line, found wanting or accepted, and nothing else changed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.hostile.mutated.kinds import KINDS, DamageRunner, draw_case
from tests.parameters import every

MANY = 15


@pytest.mark.parametrize(
    ("name", "examples"), every([(name, count) for name in KINDS for count in (4, MANY)], [(name, 4) for name in KINDS])
)
def test_damaged_file_is_refused_or_harmless(whole_house: Path, tmp_path: Path, name: str, examples: int) -> None:
    runner = DamageRunner(whole_house, tmp_path / "house")

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate],  # `make fuzz` looks for the smallest file
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def hold(random: Random) -> None:
        runner.evaluate(draw_case(name, whole_house, random))

    hold()
