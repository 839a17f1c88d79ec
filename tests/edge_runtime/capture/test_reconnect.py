"""When a camera is lost and retried, decided without a thread or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.capture.reconnect import PAUSES, CameraPhase, LinkState, retry_pause_s

FRESH = LinkState(CameraPhase.CONNECTING, 0.0)


def test_link_streams_again_after_a_loss():
    link = FRESH.stream()
    assert (link.state, link.away_since, link.reconnects) == (CameraPhase.STREAMING, None, 0)
    link = link.lose("reset", 10.0, forever=True, jitter=1.0)
    assert (link.state, link.problem, link.away_since, link.retry_at) == (CameraPhase.AWAY, "reset", 10.0, 10.5)
    link = link.retry()
    assert (link.phase, link.state) == (CameraPhase.CONNECTING, CameraPhase.AWAY), "shown as away until a frame"
    link = link.stream()
    assert (link.state, link.problem, link.away_since, link.reconnects) == (CameraPhase.STREAMING, None, None, 1)


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_retry_pause_grows_with_time_away(jitter):
    pauses = [retry_pause_s(away_s, jitter) for away_s in (0, 8, 60, PAUSES.long_away_s, 1e4)]
    assert pauses == sorted(pauses) and pauses[0] <= 0.5 and pauses[1] <= 2.0
    assert PAUSES.max_s / 2 <= pauses[2] <= PAUSES.max_s == retry_pause_s(60, 1.0)
    assert PAUSES.max_long_away_s / 2 <= pauses[4] <= PAUSES.max_long_away_s == retry_pause_s(1e4, 1.0)


def test_link_with_permanent_cause_is_retried_rarely():
    link = FRESH.lose("401", 1.0, forever=True, permanent=True)
    assert link.permanent and link.retry_at == 1.0 + PAUSES.permanent_s
    link = link.retry().stream().lose("404", 100.0, forever=True, permanent=True)
    assert not link.permanent and link.retry_at == 100.5, "it may be starting"
    later = 100.0 + PAUSES.permanent_s
    link = link.retry().lose("404", later, forever=True, permanent=True)
    assert link.permanent and link.retry_at == later + PAUSES.permanent_s
    assert not link.retry().stream().permanent


STEPS = st.sampled_from(["stream", "lose", "retry"])


@given(st.booleans(), st.booleans(), st.lists(st.tuples(STEPS, st.floats(0, 100), st.floats(0, 1)), max_size=60))
def test_link_is_consistent_after_any_events(forever, permanent, steps):
    link, now, streams = FRESH, 0.0, 0
    for step, pause_s, jitter in steps:
        now += pause_s
        before = link
        if link.phase is CameraPhase.AWAY:
            link = link.retry() if step == "retry" else link.stream()
            assert step == "retry" or link == before, "frames of an abandoned connection do not count"
        elif step == "stream":
            link = link.stream()
            streams += before.phase is CameraPhase.CONNECTING
        elif step == "lose" and link.phase is not CameraPhase.ENDED:
            link = link.lose("gone", now, forever, jitter, permanent)
            assert link.phase is (CameraPhase.AWAY if forever else CameraPhase.ENDED)
        assert (link.retry_at is not None) == (link.phase is CameraPhase.AWAY)
        assert (link.away_since is None) == (link.phase is CameraPhase.STREAMING)
        assert link.problem is None or link.phase is not CameraPhase.STREAMING
        assert link.reconnects == max(0, streams - 1)
        if link.retry_at is not None and before.retry_at is None:
            longest_s = PAUSES.permanent_s if link.permanent else PAUSES.max_long_away_s
            assert 0 < link.retry_at - now <= longest_s + 1e-9, "beyond rounding"
    ended = link.end()
    assert (ended.phase, ended.retry_at, ended.problem) == (CameraPhase.ENDED, None, link.problem)
