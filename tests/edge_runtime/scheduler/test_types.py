"""Staleness curves: accuracy by age, its sum, and the gain of a fresh result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.scheduler.types import (
    accuracy_at,
    mean_accuracy,
    monotone_curve,
    staleness_gain,
    summed_accuracy,
)

CURVE = (1.0, 0.8, 0.5)
curves = st.lists(st.floats(0, 1), min_size=1, max_size=20).map(monotone_curve)


def test_accuracy_at_any_age_is_interpolated():
    assert [accuracy_at(CURVE, age) for age in (0, 1, 1.5, 2, 7)] == pytest.approx([1.0, 0.8, 0.65, 0.5, 0.5])


def test_summed_accuracy_adds_the_frames():
    assert [summed_accuracy(CURVE, count) for count in (0, 1, 2, 3, 5)] == pytest.approx([0, 1.0, 1.8, 2.3, 3.3])
    assert summed_accuracy(CURVE, 1.5) == pytest.approx(1.4)


def test_staleness_gain_worthless_old_results_is_one_a_frame():
    assert [staleness_gain((1.0, 0.0), frames) for frames in (1, 2, 9, 100)] == [1, 1, 1, 1]


def test_staleness_gain_flat_curve_is_zero():
    assert staleness_gain((0.9, 0.9, 0.9), 50) == pytest.approx(0)


@given(curves, st.integers(0, 30))
def test_staleness_gain_grows_with_age(curve, frames):
    assert staleness_gain(curve, frames + 1) >= staleness_gain(curve, frames) - 1e-9


def test_monotone_curve_never_rises():
    assert monotone_curve([0.9, 0.7, 0.8, 0.6]) == (0.9, 0.7, 0.7, 0.6)


def test_mean_accuracy_scores_the_newest_result():
    answers = [(1.1, 1.0), (1.4, 1.3), (1.5, 1.2)]
    found = mean_accuracy(CURVE, 10.0, [1.0, 1.1, 1.3, 1.5], answers)
    assert found == pytest.approx((0.0 + 0.8 + 0.5 + 0.5) / 4), "none yet; one, three and two frames old"
    assert mean_accuracy(CURVE, 10.0, [], answers) == mean_accuracy(CURVE, 10.0, [1.0], ()) == 0.0
