"""The steps of a reload: who asked, what is checked at present, what comes of it.

Pure: no thread, no clock, no file. Whoever asks while a check is under way is answered by the next one, since what they
changed may have come too late for this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

STOPS = "the box stops"


class Phase(Enum):
    """What is done at present."""

    IDLE = "idle"
    CHECKING = "checking"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody, known by a number, asks for a reload."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The other box can serve, and waits to be taken up between two frames; or there is nothing to change."""

    changes: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    """Something is wrong with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenUp:
    """It serves."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The box stops."""


Event = Asked | Checked | Refused | TakenUp | Ended


@dataclass(frozen=True, slots=True)
class State:
    """Where it stands: who is answered by what is under way, and by the next check; the outcomes so far.

    `reason` says why the last one was refused, None where it was applied; `at` is when that was, in seconds of `now`.
    """

    phase: Phase = Phase.IDLE
    asked: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    applied: int = 0
    refused: int = 0
    reason: str | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """These are told the outcome: None where it was applied, else the reason why it was not."""

    tickets: tuple[int, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Do:
    """What is to be done after a step: tell somebody, and begin a check."""

    told: Told | None = None
    check: bool = False


def step(state: State, event: Event, now: float) -> tuple[State, Do]:
    """The state after an event, and what it asks for. An event that cannot be in this state changes nothing."""
    if state.phase is Phase.ENDED:
        return state, Do(Told((event.ticket,), STOPS)) if isinstance(event, Asked) else Do()
    match event:
        case Asked(ticket) if state.phase is Phase.IDLE:
            return replace(state, phase=Phase.CHECKING, asked=(ticket,)), Do(check=True)
        case Asked(ticket):
            return replace(state, later=(*state.later, ticket)), Do()
        case Checked(changes) if state.phase is Phase.CHECKING:
            return (replace(state, phase=Phase.READY), Do()) if changes else _over(state, None, now)
        case Refused(reason) if state.phase is not Phase.IDLE:
            return _over(state, reason, now)
        case TakenUp() if state.phase is Phase.READY:
            return _over(state, None, now)
        case Ended():
            waiting = (*state.asked, *state.later)
            return replace(state, phase=Phase.ENDED, asked=(), later=()), Do(Told(waiting, STOPS) if waiting else None)
    return state, Do()


def _over(state: State, reason: str | None, now: float) -> tuple[State, Do]:
    """An outcome; whoever asked meanwhile is next."""
    after = State(
        Phase.CHECKING if state.later else Phase.IDLE,
        state.later,
        (),
        state.applied + (reason is None),
        state.refused + (reason is not None),
        reason,
        now,
    )
    return after, Do(Told(state.asked, reason), bool(state.later))
