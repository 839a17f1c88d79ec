"""The steps of a reload, without a thread: everybody is answered once, by a check that began after they asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from edge_runtime.reload import (
    STOPS,
    ReloadApplied,
    ReloadChecked,
    ReloadPhase,
    ReloadRefused,
    ReloadRequested,
    ReloadState,
    ReloadStopped,
    next_reload_state,
)


def after(*events, state=None):
    """The state after these events at 0, 1, 2 ... seconds, and what they asked for."""
    state, done = state or ReloadState(), []
    for now, event in enumerate(events):
        state, do = next_reload_state(state, event, float(now))
        done.append(do)
    return state, done


def test_a_reload_is_checked_taken_up_and_told():
    state, (begun, ready, over) = after(ReloadRequested(1), ReloadChecked(), ReloadApplied())
    assert begun.check and not ready.told and over.told is not None
    assert (over.told.tickets, over.told.reason) == ((1,), None)
    assert (state.phase, state.applied, state.refused, state.reason, state.at) == (ReloadPhase.IDLE, 1, 0, None, 2.0)


def test_what_is_wrong_is_not_taken_up_and_the_next_right_one_clears_it():
    state, (_, over) = after(ReloadRequested(1), ReloadRefused("the bundle is cut"))
    assert over.told is not None and over.told.reason == state.reason == "the bundle is cut" and state.refused == 1
    state, _ = after(ReloadRequested(2), ReloadChecked(changes=False), state=state)
    assert (state.applied, state.refused, state.reason) == (1, 1, None)


def test_whoever_asks_meanwhile_is_answered_by_the_next_check():
    state, done = after(ReloadRequested(1), ReloadRequested(2), ReloadChecked(), ReloadRequested(3), ReloadApplied())
    assert state.phase is ReloadPhase.CHECKING and state.asked == (2, 3) and done[-1].check
    assert done[-1].told is not None and done[-1].told.tickets == (1,)


def test_at_the_end_all_are_told():
    state, done = after(ReloadRequested(1), ReloadRequested(2), ReloadStopped(), ReloadRequested(3))
    assert [(do.told.tickets, do.told.reason) for do in done if do.told] == [((1, 2), STOPS), ((3,), STOPS)]
    assert state.phase is ReloadPhase.ENDED


EVENTS = some.one_of(
    some.just(None), some.just(ReloadChecked()), some.just(ReloadChecked(changes=False)),
    some.just(ReloadRefused("no")),
    some.just(ReloadApplied()), some.just(ReloadStopped()),
)  # fmt: skip


@given(some.lists(EVENTS, max_size=30))
def test_nobody_is_told_twice_and_nobody_is_forgotten(events):
    state, tickets, told, checks, outcomes = ReloadState(), 0, [], 0, 0
    for now, event in enumerate(events):
        asked = event is None
        tickets += asked
        state, do = next_reload_state(state, ReloadRequested(tickets) if asked else event, float(now))
        told += do.told.tickets if do.told else ()
        checks += do.check
        outcomes = state.applied + state.refused
        assert (
            checks - outcomes == (state.phase in (ReloadPhase.CHECKING, ReloadPhase.READY))
            or state.phase is ReloadPhase.ENDED
        )
    assert sorted([*told, *state.asked, *state.later]) == list(range(1, tickets + 1))
