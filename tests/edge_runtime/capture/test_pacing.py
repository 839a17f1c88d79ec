"""Rates and times of frames, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.capture.reader import MAX_LATE_S, Playback, RateGate, RecentRate


def test_rate_gate_passes_first_frame_of_each_period():
    gate = RateGate(10)
    assert [i for i in range(30) if gate.passes(i / 30)] == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]


@given(st.floats(1, 60), st.floats(1.1, 600), st.floats(0.0001, 0.01))
def test_playback_after_a_pause_has_no_burst(pace, retry_pause_s, decode_s):
    playback, now, index, gone = Playback(0.0, pace), retry_pause_s, 0, 0
    while playback.wait_s(index, now) == 0 and index < 5000:
        gone += playback.passes(index, now)
        index, now = index + 1, now + decode_s
    assert gone <= (now - retry_pause_s) * pace + 3


def test_playback_with_slow_decoder_delivers_every_frame():
    playback = Playback(0.0, 10.0)
    assert all(playback.passes(index, index * 0.2) for index in range(200))


def test_playback_counts_whole_missed_laps():
    playback = Playback(0.0, 10.0)
    assert playback.missed_laps(0, 20, MAX_LATE_S) == 0 == playback.missed_laps(0, 0, 100.0)
    assert playback.missed_laps(20, 20, 2.0 + 7.5) == 3


def test_recent_rate_covers_ten_seconds():
    rate = RecentRate()
    assert rate.per_second(0.0) == 0.0
    for index in range(100):
        rate.add(index / 5)
    assert rate.per_second(20.0) == pytest.approx(5.0)
    assert rate.per_second(40.0) == 0.0
