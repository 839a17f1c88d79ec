"""Accuracy over time: which answer stands at each moment, however late it came."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.stream_eval import Footage, Stream, build_stream, build_streams, latest_results, length_s, sampled_positions


@dataclass(frozen=True)
class Done:
    index: int
    captured_at: float
    finished_at: float | None
    query: str = "q"


def stream(at_s, plays=None, delivered=None):
    plays = plays or (0,) * len(at_s)
    return Stream(tuple(at_s), tuple(range(len(at_s))), tuple(plays), tuple(delivered or range(len(at_s))))


def test_before_the_first_result_there_is_no_answer():
    assert latest_results(stream([0, 1, 2]), []) == [None, None, None]
    assert latest_results(stream([0, 1, 2]), [Done(0, 0, 1.5)]) == [None, None, 0]


def test_a_result_finished_exactly_at_the_moment_counts():
    assert latest_results(stream([0, 1, 2]), [Done(0, 0, 1.0)]) == [None, 0, 0]


def test_a_late_result_is_scored_against_the_later_frame_however_old():
    late = [Done(0, 0, 2.5), Done(3, 3, 9.0)]
    assert latest_results(stream([0, 1, 2, 3, 4, 5]), late) == [None, None, None, 0, 0, 0]


def test_dropped_frames_leave_the_older_answer_standing():
    outcomes = [Done(0, 0, 0.5), Done(1, 1, None), Done(2, 2, 2.5)]
    assert latest_results(stream([0, 1, 2, 3]), outcomes) == [None, 0, 0, 2]


def test_of_two_finished_results_the_newer_frame_stands():
    out_of_order = [Done(1, 1, 2.5), Done(0, 0, 2.6)]
    assert latest_results(stream([0, 1, 2, 3]), out_of_order) == [None, None, None, 1]


def test_a_result_of_the_previous_unit_no_longer_counts():
    two_units = stream([0, 1, 2, 3], plays=(0, 0, 1, 1))
    assert latest_results(two_units, [Done(1, 1, 1.5), Done(2, 2, 2.5)]) == [None, None, None, 2]
    assert latest_results(two_units, [Done(1, 1, 2.5)]) == [None, None, None, None]


def test_results_count_by_delivered_frame_when_the_camera_is_slower_than_the_labels():
    assert latest_results(stream([0, 1, 2, 3], delivered=(0, 2)), [Done(0, 0, 0.5), Done(1, 2, 2.5)]) == [
        None,
        0,
        0,
        2,
    ]


def test_thinning_keeps_the_camera_s_rate_without_drift():
    times = [frame / 25 for frame in range(250)]
    assert len(sampled_positions(times, 10)) == 100
    assert sampled_positions(times, None) == list(range(250))
    assert sampled_positions([0.0, 1.0, 2.0], 30) == [0, 1, 2]
    assert sampled_positions([5.0, 5.04, 5.08, 5.12, 5.2], 10) == [0, 3, 4]


def test_a_stream_plays_every_unit_in_its_own_order_of_time():
    footage = Footage(("a", "a", "b", "b"), (1.0, 0.0, 10.0, 11.0), None)
    laid = build_stream(footage, random.Random(0), until_s=0)
    assert length_s(footage) == 4.0
    assert sorted(laid.frames) == [0, 1, 2, 3]
    assert laid.frames.index(1) + 1 == laid.frames.index(0)
    assert all(b - a == pytest.approx(1.0) for a, b in pairwise(laid.at_s))
    assert 0 <= laid.at_s[0] <= 1.0


def test_short_streams_go_on_until_the_longest_has_played_once():
    footage = {
        "long": Footage(("a",) * 50, tuple(map(float, range(50))), 1),
        "short": Footage(("b",) * 5, (0, 1, 2, 3, 4), 1),
    }
    streams = build_streams(footage, seed=1)
    assert len(streams["long"].at_s) == 50
    assert len(streams["short"].at_s) in (50, 55)
    assert len(set(streams["short"].plays)) >= 10


def test_seeds_draw_different_streams_and_the_same_seed_the_same():
    footage = {"q": Footage(tuple("abcdef"), (0.0,) * 6, 2.0)}
    assert build_streams(footage, 3) == build_streams(footage, 3)
    assert build_streams(footage, 3) != build_streams(footage, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=25, unique=True),
    st.integers(0, 5),
)
def test_every_labelled_frame_is_played_and_time_never_goes_back(frames, seed):
    footage = Footage(tuple(unit for unit, _ in frames), tuple(time / 10 for _, time in frames), 4.0)
    laid = build_streams({"q": footage}, seed)["q"]
    assert set(laid.frames) == set(range(len(frames)))
    assert list(laid.at_s) == sorted(laid.at_s)
    assert set(laid.delivered) <= set(range(len(laid.at_s)))
    instant = [Done(index, at, at) for index, at in enumerate(laid.arrivals())]
    for moment, frame in enumerate(latest_results(laid, instant)):
        assert frame is not None, "an instant device always has an answer"
        assert footage.units[frame] == footage.units[laid.frames[moment]]
