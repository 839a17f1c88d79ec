"""The breaker: closed, open and half-open, from given times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backoff import BackOff
from edge_runtime.executor import CLOSED, HALF_OPEN, MAX_QUERY_FAILURES, OPEN, Breaker


def trip_breaker() -> Breaker:
    breaker = Breaker(BackOff(1.0, 8.0), lambda: 0.0)
    for _ in range(MAX_QUERY_FAILURES):
        assert breaker.state(0.0) == CLOSED
        breaker.record_failure(0.0)
    assert breaker.state(0.0) == OPEN and breaker.open_until == 1.0
    return breaker


def test_breaker_opens_after_failures_in_a_row():
    breaker = Breaker()
    for _ in range(10):
        for _ in range(MAX_QUERY_FAILURES - 1):
            breaker.record_failure(0.0)
        assert not breaker.record_success() and breaker.state(0.0) == CLOSED


def test_breaker_pauses_double_up_to_the_maximum():
    breaker, now, pauses = trip_breaker(), 0.0, []
    assert breaker.state(0.5) == OPEN and breaker.state(0.99) == OPEN != breaker.state(1.0)
    for _ in range(5):
        now = max(now, breaker.open_until)
        assert breaker.state(now) == HALF_OPEN
        breaker.record_failure(now)
        pauses.append(breaker.open_until - now)
        assert breaker.state(now) == OPEN
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_breaker_closes_after_success():
    breaker = trip_breaker()
    assert breaker.state(1.0) == HALF_OPEN and breaker.record_success() and breaker.state(1.0) == CLOSED
    breaker.record_failure(1.0)
    assert breaker.state(1.0) == CLOSED


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60), st.floats(0, 0.99))
def test_breaker_pause_always_ends(events, chance):
    breaker, now = Breaker(chance=lambda: chance), 0.0
    for well, later in events:
        now += later
        if well:
            breaker.record_success()
        else:
            breaker.record_failure(now)
        assert breaker.state(now + 60.0) != OPEN
        assert breaker.state(now + 60.0) != OPEN
