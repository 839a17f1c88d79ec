"""Staleness curves: what an answer is worth at an age, what it brings while it stands, what a fresh one brings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.scheduler.types import accuracy_at, mean_accuracy, monotone_curve, staleness_gain, summed_accuracy

CURVE = (1.0, 0.8, 0.5)
curves = st.lists(st.floats(0, 1), min_size=1, max_size=20).map(monotone_curve)


def test_between_two_ages_accuracy_lies_on_the_line_and_beyond_the_last_it_stays():
    assert [accuracy_at(CURVE, age) for age in (0, 1, 1.5, 2, 7)] == pytest.approx([1.0, 0.8, 0.65, 0.5, 0.5])


def test_what_an_answer_brings_is_the_sum_over_the_frames_that_it_stands_for():
    assert [summed_accuracy(CURVE, count) for count in (0, 1, 2, 3, 5)] == pytest.approx([0, 1.0, 1.8, 2.3, 3.3])
    assert summed_accuracy(CURVE, 1.5) == pytest.approx(1.4)


def test_where_an_answer_holds_for_its_own_frame_alone_every_frame_is_wanted_alike():
    assert [staleness_gain((1.0, 0.0), frames) for frames in (1, 2, 9, 100)] == [1, 1, 1, 1]


def test_where_nothing_changes_a_fresh_answer_brings_nothing():
    assert staleness_gain((0.9, 0.9, 0.9), 50) == pytest.approx(0)


@given(curves, st.integers(0, 30))
def test_the_older_the_newest_answer_the_more_a_fresh_one_is_wanted(curve, frames):
    assert staleness_gain(curve, frames + 1) >= staleness_gain(curve, frames) - 1e-9


def test_noise_never_makes_an_old_answer_better_than_a_young_one():
    assert monotone_curve([0.9, 0.7, 0.8, 0.6]) == (0.9, 0.7, 0.7, 0.6)


def test_accuracy_over_time_is_that_of_the_newest_answer_that_is_there():
    answers = [(1.1, 1.0), (1.4, 1.3), (1.5, 1.2)]
    found = mean_accuracy(CURVE, 10.0, [1.0, 1.1, 1.3, 1.5], answers)
    assert found == pytest.approx((0.0 + 0.8 + 0.5 + 0.5) / 4), "none yet; one, three and two frames old"
    assert mean_accuracy(CURVE, 10.0, [], answers) == mean_accuracy(CURVE, 10.0, [1.0], ()) == 0.0
