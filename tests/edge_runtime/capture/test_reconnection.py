"""When a camera is lost and tried again, decided without a thread or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.capture.reconnect import (
    PAUSES,
    CameraPhase,
    FrameCame,
    LinkRules,
    Lost,
    SourceEnded,
    Stopped,
    TimePassed,
    initial_link,
    next_link,
    retry_pause_s,
)

LIVE, ONCE = LinkRules(5.0, forever=True), LinkRules(5.0, forever=False)
EVENTS = st.one_of(
    st.just(FrameCame()),
    st.builds(Lost, st.sampled_from(["refused", "reset"])),
    st.just(SourceEnded()),
    st.builds(TimePassed, st.none() | st.floats(0, 2000)),
)
RULES = st.sampled_from([LIVE, ONCE, LinkRules(0.5, forever=True)])


def after(*events, rules=LIVE, now=0.0):
    link = initial_link(now)
    for event in events:
        link = next_link(link, event, now, rules)
    return link


def test_link_streams_with_a_frame_and_after_a_loss():
    link = after(FrameCame())
    assert (link.state, link.away_since, link.reconnects) == (CameraPhase.STREAMING, None, 0)
    link = next_link(link, Lost("reset"), 10.0, LIVE)
    assert (link.state, link.problem, link.away_since) == (CameraPhase.AWAY, "reset", 10.0)
    assert next_link(link, TimePassed(), 10.2, LIVE) == link, "not yet"
    link = next_link(link, TimePassed(), 10.5, LIVE)
    assert (link.phase, link.state, link.retry_at) == (CameraPhase.CONNECTING, CameraPhase.AWAY, None), (
        "told as away until a frame"
    )
    link = next_link(link, FrameCame(), 10.6, LIVE)
    assert (link.state, link.problem, link.away_since, link.reconnects) == (CameraPhase.STREAMING, None, None, 1)


def test_link_is_lost_after_timeout():
    for link in (after(), after(FrameCame())):
        assert next_link(link, TimePassed(1.0), 5.9, LIVE) == link
        assert next_link(link, TimePassed(None), 99.0, LIVE) == link, "it waits for the frame's time"
        lost = next_link(link, TimePassed(1.0), 6.0, LIVE)
        assert (lost.phase, lost.problem) == (CameraPhase.AWAY, "no frame came for 5 s")


def test_link_of_a_file_ends():
    assert after(FrameCame(), SourceEnded(), rules=ONCE).problem is None
    for events in ([SourceEnded()], [Lost("gone")], [FrameCame(), Lost("gone")]):
        link = after(*events, rules=ONCE)
        assert link.phase is CameraPhase.ENDED and link.problem


def test_link_of_a_live_camera_is_always_retried():
    for event in (SourceEnded(), Lost("gone"), TimePassed(-9.0)):
        for link in (after(event), after(FrameCame(), event)):
            assert link.phase is CameraPhase.AWAY and link.retry_at is not None


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_retry_pause_grows_with_time_away(jitter):
    assert retry_pause_s(0, jitter) <= 0.5 and retry_pause_s(8, jitter) <= 2.0
    assert PAUSES.max_s / 2 <= retry_pause_s(60, jitter) <= PAUSES.max_s == retry_pause_s(60, 1.0)
    assert (
        PAUSES.max_long_away_s / 2
        <= retry_pause_s(PAUSES.long_away_s, jitter)
        <= PAUSES.max_long_away_s
        == retry_pause_s(PAUSES.long_away_s + 1e4, 1.0)
    )


def test_link_stopped_stays_ended():
    for link in (after(), after(FrameCame()), after(Lost("gone"))):
        ended = next_link(link, Stopped(), 1.0, LIVE)
        assert ended.phase is CameraPhase.ENDED and ended.problem == link.problem and ended.retry_at is None
        for event in (FrameCame(), Lost("x"), SourceEnded(), TimePassed(-100.0)):
            assert next_link(ended, event, 2.0, LIVE) == ended


@given(RULES, st.lists(st.tuples(EVENTS, st.floats(0, 100), st.floats(0, 1)), max_size=60))
def test_link_is_consistent_after_any_events(rules, happened):
    link, now, streamed = initial_link(0.0), 0.0, 0
    for event, later, jitter in happened:
        before, now = link, now + later
        link = next_link(before, event, now, rules, jitter)
        streamed += before.phase is not CameraPhase.STREAMING and link.phase is CameraPhase.STREAMING
        assert (link.retry_at is not None) == (link.phase is CameraPhase.AWAY)
        assert link.away_since is None if link.phase is CameraPhase.STREAMING else link.away_since is not None
        assert link.problem is None or link.phase is not CameraPhase.STREAMING
        assert link.reconnects == max(0, streamed - 1)
        if link.retry_at is not None and before.phase is not CameraPhase.AWAY:
            assert 0 < link.retry_at - now <= PAUSES.max_long_away_s
            assert next_link(link, TimePassed(), link.retry_at, rules).phase is CameraPhase.CONNECTING
        if rules.forever:
            assert link.phase is not CameraPhase.ENDED
        if before.phase is CameraPhase.AWAY and not isinstance(event, TimePassed):
            assert link == before, "what a connection that was let go still brings does not count"
