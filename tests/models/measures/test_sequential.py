"""A fall of quality is found within hours, and unchanged quality gives hardly an alarm in a year, in bursts, too."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drift.years import RATE, draw_agreement, find_alarms, simulate
from gemel.models.measures.sequential import DETECTOR, FallDetector, choose_block, group_values, run_length_of_year

LIMIT, YEARS = 0.95, 6


@pytest.mark.parametrize("burst", [1, 3, 10])
@pytest.mark.parametrize("queries", [1, 10])
def test_unchanged_quality_gives_at_most_one_alarm_in_a_year(queries: int, burst: int) -> None:
    random = np.random.default_rng(burst)
    alarms, _ = simulate(random, LIMIT, queries, YEARS * queries, burst, LIMIT, LIMIT)
    assert alarms.sum() <= YEARS


def test_fall_by_five_points_is_found_within_two_thousand_frames() -> None:
    _, delays = simulate(np.random.default_rng(0), LIMIT, 10, 20, 1, 0.985, LIMIT - 0.05)
    assert delays.max() <= 2_000


@pytest.mark.parametrize(("burst", "least", "most"), [(1, 10, 10), (10, 40, 80), (60, 160, 320)])
def test_blocks_are_some_times_as_long_as_bursts(burst: int, least: int, most: int) -> None:
    random, blocks = np.random.default_rng(burst), list[int]()
    for _ in range(10):
        blocks.append(choose_block(draw_agreement(random, DETECTOR.measured, LIMIT, burst).tolist()))
    assert least <= np.median(blocks) <= most and max(blocks) <= DETECTOR.max_block
    assert choose_block([]) == DETECTOR.block


def test_detector_of_many_queries_alarms_as_that_of_each() -> None:
    frames = draw_agreement(np.random.default_rng(0), 4_000, 0.85, 3)
    means = group_values(frames.tolist(), 40)
    detector = FallDetector(LIMIT, run_length_of_year(RATE, 1))
    alarms = [detector.add(mean, 40) for mean in means]
    (many,) = find_alarms(np.asarray([means]), 40, LIMIT, detector.run_length)
    assert alarms.index(True) == many.argmax() and many.any()


def test_total_loss_is_found_at_once() -> None:
    detector = FallDetector(LIMIT, run_length_of_year(1 / 60, 10))
    assert [detector.add(0.0, 40) for _ in range(6)][-1]


def test_wealth_never_falls_below_nothing_and_goes_on_where_it_was() -> None:
    whole, first = FallDetector(LIMIT, 100.0), FallDetector(LIMIT, 100.0)
    values = np.random.default_rng(1).random(50).tolist()
    for value in values:
        whole.add(value, 5)
    for value in values[:20]:
        first.add(value, 5)
    second = FallDetector(LIMIT, 100.0, list(first.wealth))
    for value in values[20:]:
        second.add(value, 5)
    assert second.wealth == whole.wealth and min(whole.wealth) >= 0


def test_rest_of_a_group_waits() -> None:
    assert group_values([1.0] * 5 + [0.0] * 4, 5) == [1.0]
