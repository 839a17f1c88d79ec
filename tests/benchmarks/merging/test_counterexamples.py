"""The cells in which earlier ways to accept failed: they are drawn as merges observe them, and seldom accepted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.merging.counterexamples import PARTS, Units, cells, false_rate
from gemel.merger.observe import pseudo_values
from gemel.models.tasks import task_of

ROUNDS = 400


def test_values_of_units_are_those_of_a_merge() -> None:
    random = np.random.default_rng(0)
    shown = random.integers(1, 9, (7, 3))
    before = random.binomial(shown, 0.8)
    after = random.binomial(before, 0.9)
    found = Units(before, after, shown, np.ones(7)).measure_labels()
    task = task_of("classification")
    for values, right in ((found.original, before), (found.merged, after)):
        assert values == pytest.approx(pseudo_values(task, np.stack([right, shown], 1)))


@pytest.mark.parametrize("part", PARTS)
def test_counterexamples_are_seldom_accepted(part: str) -> None:
    drawn = list(cells(part))
    for _, draw in drawn[:: max(1, len(drawn) // 3)]:
        assert false_rate(draw, ROUNDS, seed=1) <= 0.05
