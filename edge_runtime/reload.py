"""The steps of a reload: who asked, what is checked at present, what comes of it.

Pure: no thread, no clock, no file. Whoever asks while a check is under way is answered by the next one, since what they
changed may have come too late for this one.

Reloads at work: a thread checks another box beside the one that serves, which goes over to it between two frames.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from edge_runtime.box import ReadyBox
from edge_runtime.results import BUNDLE_DIGITS
from edge_runtime.runtime import ActiveConfig, PendingConfig, Runtime, changes_text
from models.errors import message_of

if TYPE_CHECKING:
    from edge_runtime.inference import InferenceThread


STOPS = "the box stops"


class ReloadPhase(Enum):
    """What is done at present."""

    IDLE = "idle"
    CHECKING = "checking"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReloadRequested:
    """Somebody, known by a number, asks for a reload."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ReloadChecked:
    """The other box can serve, and waits to be taken up between two frames; or there is nothing to change."""

    changes: bool = True


@dataclass(frozen=True, slots=True)
class ReloadRefused:
    """Something is wrong with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReloadApplied:
    """It serves."""


@dataclass(frozen=True, slots=True)
class ReloadStopped:
    """The box stops."""


ReloadEvent = ReloadRequested | ReloadChecked | ReloadRefused | ReloadApplied | ReloadStopped


@dataclass(frozen=True, slots=True)
class ReloadState:
    """Where it stands: who is answered by what is under way, and by the next check; the outcomes so far.

    `reason` says why the last one was refused, None where it was applied; `at` is when that was, in seconds of `now`.
    """

    phase: ReloadPhase = ReloadPhase.IDLE
    asked: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    applied: int = 0
    refused: int = 0
    reason: str | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """These are told the outcome: None where it was applied, else the reason why it was not."""

    tickets: tuple[int, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class ReloadAction:
    """What is to be done after a step: tell somebody, and begin a check."""

    told: ReloadOutcome | None = None
    check: bool = False


def next_reload_state(state: ReloadState, event: ReloadEvent, now: float) -> tuple[ReloadState, ReloadAction]:
    """The state after an event, and what it asks for. An event that cannot be in this state changes nothing."""
    if state.phase is ReloadPhase.ENDED:
        return state, ReloadAction(ReloadOutcome((event.ticket,), STOPS)) if isinstance(
            event, ReloadRequested
        ) else ReloadAction()
    match event:
        case ReloadRequested(ticket) if state.phase is ReloadPhase.IDLE:
            return replace(state, phase=ReloadPhase.CHECKING, asked=(ticket,)), ReloadAction(check=True)
        case ReloadRequested(ticket):
            return replace(state, later=(*state.later, ticket)), ReloadAction()
        case ReloadChecked(changes) if state.phase is ReloadPhase.CHECKING:
            return (replace(state, phase=ReloadPhase.READY), ReloadAction()) if changes else _over(state, None, now)
        case ReloadRefused(reason) if state.phase is not ReloadPhase.IDLE:
            return _over(state, reason, now)
        case ReloadApplied() if state.phase is ReloadPhase.READY:
            return _over(state, None, now)
        case ReloadStopped():
            waiting = (*state.asked, *state.later)
            return replace(state, phase=ReloadPhase.ENDED, asked=(), later=()), ReloadAction(
                ReloadOutcome(waiting, STOPS) if waiting else None
            )
    return state, ReloadAction()


def _over(state: ReloadState, reason: str | None, now: float) -> tuple[ReloadState, ReloadAction]:
    """An outcome; whoever asked meanwhile is next."""
    after = ReloadState(
        ReloadPhase.CHECKING if state.later else ReloadPhase.IDLE,
        state.later,
        (),
        state.applied + (reason is None),
        state.refused + (reason is not None),
        reason,
        now,
    )
    return after, ReloadAction(ReloadOutcome(state.asked, reason), bool(state.later))


SWITCH_S = 0.0005
"""How often the interpreter changes threads during a check. A run of a network takes and leaves it hundreds of times;
waiting the usual 5 ms for it each time would make a run many times as long (seen here: 755 ms for 20, and 100 so).
"""
SINK_TIMEOUT_S = 5.0
"""How long sinks that are gone may take to deliver what waits for them."""

log = logging.getLogger("gemel.run")

BuildBox = Callable[[ActiveConfig], ReadyBox | None]
"""Opens, fits and equips the box anew, as config and bundle are now; None where they are what is at work.

Raises InputError where anything is wrong with them.
"""


@dataclass(frozen=True, eq=False)
class _Applied:
    """What was taken up, and what was at work before."""

    successor: PendingConfig
    before: ActiveConfig


class ReloadManager:
    """Whoever asks gets the outcome: None where it was applied, else the reason. `state` counts them.

    `notify` is told whether a reload is under way, `applied` of the box that serves from now on.
    """

    def __init__(
        self,
        workplace: Runtime,
        refit: BuildBox,
        notify: Callable[[bool], object] = lambda _: None,
        applied: Callable[[ReadyBox], object] = lambda _: None,
    ) -> None:
        self.state = ReloadState()
        self._workplace, self._refit, self._notify, self._applied = workplace, refit, notify, applied
        self._futures: dict[int, Future[str | None]] = {}
        self._tickets = itertools.count()
        self._changed = threading.Condition()
        self._ready: PendingConfig | None = None
        self._taken: _Applied | None = None
        self._thread = threading.Thread(target=self._work, name="reloads", daemon=True)

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()

    def ask(self) -> Future[str | None]:
        """Ask for a reload; from any thread."""
        with self._changed:
            ticket = next(self._tickets)
            future = self._futures[ticket] = Future()
            self._go(ReloadRequested(ticket))
        return future

    def take_up(self, inference: InferenceThread) -> None:
        """Go over to what is ready, if anything is; called between two frames by the thread that runs queries."""
        if self._ready is None:
            return
        with self._changed:
            successor, self._ready = self._ready, None
            if successor is None:
                return
            started, before = time.monotonic(), self._workplace.now
            self._workplace.go_over(successor)
            inference.follow(before.box)
            log.info(
                "reloaded: bundle %s, %s; frames waited %.0f ms",
                successor.work.identity.bundle[:BUNDLE_DIGITS],
                changes_text(before.queries, successor.work.queries),
                1000 * (time.monotonic() - started),
            )
            self._taken = _Applied(successor, before)
            self._go(ReloadApplied())

    def stop(self) -> None:
        """No more; whoever waits is told so."""
        with self._changed:
            self._go(ReloadStopped())
            if self._ready is not None:
                self._workplace.drop(self._ready)
                self._ready = None
            self._changed.notify_all()

    def _work(self) -> None:
        while self._waits_for(lambda: self.state.phase is ReloadPhase.CHECKING):
            self._notify(True)
            with _giving_way():
                found = self._checked()
            if isinstance(found, PendingConfig):
                self._hand_over(found)
            else:
                with self._changed:
                    self._go(found)
            self._notify(False)

    def _waits_for(self, what: Callable[[], object]) -> bool:
        """Wait for it; False where the box stops before."""
        with self._changed:
            self._changed.wait_for(lambda: what() or self.state.phase is ReloadPhase.ENDED)
            return self.state.phase is not ReloadPhase.ENDED

    def _checked(self) -> PendingConfig | ReloadRefused | ReloadChecked:
        try:
            box = self._refit(self._workplace.now)
            if box is not None:
                return self._workplace.prepare(box)
        except (Exception, SystemExit) as error:  # what a bundle names is imported, and may do anything
            reason = message_of(error)
            log.error("not reloaded, the box serves on as it is: %s", reason)
            return ReloadRefused(reason)
        log.info("reloaded: nothing has changed")
        return ReloadChecked(changes=False)

    def _hand_over(self, successor: PendingConfig) -> None:
        with self._changed:
            self._taken, self._ready = None, successor
            self._go(ReloadChecked())
            if self.state.phase is ReloadPhase.ENDED:
                self._ready = None
                self._workplace.drop(successor)
        self._workplace.mailboxes.nudge()
        if self._waits_for(lambda: self._taken) and self._taken is not None:
            try:
                self._settle(self._taken)
            except Exception:  # the box serves, and must hear of the next reload
                log.exception("a reload was applied, and something beside it failed")
        self._taken = None

    def _settle(self, taken: _Applied) -> None:
        """What need not be done between two frames."""
        self._applied(taken.successor.work.box)
        hanging = self._workplace.post.settle(taken.successor.rounds, SINK_TIMEOUT_S)
        if hanging:
            log.warning("not waited for: %s", ", ".join(hanging))

    def _go(self, event: ReloadEvent) -> None:
        """Take a step, and do what it asks for; the lock is held."""
        self.state, do = next_reload_state(self.state, event, time.monotonic())
        if do.told is not None:
            self._tell(do.told)
        self._changed.notify_all()

    def _tell(self, told: ReloadOutcome) -> None:
        """The lock is held."""
        for ticket in told.tickets:
            self._futures.pop(ticket).set_result(told.reason)


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """What this thread does holds up the others as little as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
