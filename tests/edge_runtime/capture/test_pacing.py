"""Rates and times of frames, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.capture.reader import BEHIND_S, Playback, RateGate, RecentRate


def test_a_gate_lets_the_first_frame_of_each_period_through():
    gate = RateGate(10)
    assert [i for i in range(30) if gate.passes(i / 30)] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


def test_a_short_hitch_loses_nothing():
    playback = Playback(50.0, 10.0)
    assert playback.wait_s(3, 50.1) == pytest.approx(0.2) and playback.wait_s(3, 50.4) == 0
    assert all(playback.passes(index, 50.0 + max(index / 10, 0.9)) for index in range(20))


@given(st.floats(1, 60), st.floats(1.1, 600), st.floats(0.0001, 0.01))
def test_after_a_pause_frames_go_through_no_faster_than_the_file_plays(pace, pause_s, decode_s):
    playback, now, index, gone = Playback(0.0, pace), pause_s, 0, 0
    while playback.wait_s(index, now) == 0 and index < 5000:
        gone += playback.passes(index, now)
        index, now = index + 1, now + decode_s
    assert gone <= (now - pause_s) * pace + 3


def test_a_decoder_that_is_always_too_slow_still_delivers_every_frame():
    playback = Playback(0.0, 10.0)
    assert all(playback.passes(index, index * 0.2) for index in range(200))


def test_laps_that_were_missed_are_whole_and_none_for_a_hitch():
    playback = Playback(0.0, 10.0)
    assert playback.missed_laps(0, 20, BEHIND_S) == 0 == playback.missed_laps(0, 0, 100.0)
    assert playback.missed_laps(20, 20, 2.0 + 7.5) == 3


def test_the_rate_is_that_of_the_last_ten_seconds():
    rate = RecentRate()
    assert rate.per_second(0.0) == 0.0
    for index in range(100):
        rate.came(index / 5)
    assert rate.per_second(20.0) == pytest.approx(5.0)
    assert rate.per_second(40.0) == 0.0
