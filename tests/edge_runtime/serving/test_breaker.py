"""The breaker: closed, open, half-open, by the moments that it is told of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backoff import BackOff
from edge_runtime.executor import CLOSED, HALF_OPEN, MAX_FAILURES, OPEN, Breaker


def tripped() -> Breaker:
    breaker = Breaker(BackOff(1.0, 8.0), lambda: 0.0)
    assert [breaker.failed(0.0) for _ in range(MAX_FAILURES)] == [None] * (MAX_FAILURES - 1) + [1.0]
    return breaker


def test_failures_in_a_row_open_it_and_a_run_between_does_not_let_them_add_up():
    breaker = Breaker()
    for _ in range(10):
        for _ in range(MAX_FAILURES - 1):
            assert breaker.failed(0.0) is None
        assert not breaker.ran() and breaker.state(0.0) == CLOSED


def test_each_failure_while_half_open_pauses_twice_as_long_up_to_the_most():
    breaker, now, pauses = tripped(), 0.0, []
    assert breaker.state(0.5) == OPEN and breaker.until(0.5) == 1.0
    for _ in range(5):
        now = breaker.until(now) or now
        assert breaker.state(now) == HALF_OPEN
        pauses.append(breaker.failed(now))
        assert breaker.state(now) == OPEN
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_run_while_half_open_closes_it_as_if_nothing_had_been():
    breaker = tripped()
    assert breaker.state(1.0) == HALF_OPEN and breaker.ran() and breaker.state(1.0) == CLOSED
    assert breaker.failed(1.0) is None


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60), st.floats(0, 0.99))
def test_no_pause_is_for_ever(events, chance):
    breaker, now = Breaker(chance=lambda: chance), 0.0
    for well, later in events:
        now += later
        if well:
            breaker.ran()
        else:
            breaker.failed(now)
        until = breaker.until(now)
        assert until is None or now < until <= now + 60.0
        assert breaker.state(now + 60.0) != OPEN
