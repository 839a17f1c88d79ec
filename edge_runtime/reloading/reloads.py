"""Reloads at work: a thread checks another box beside the one that serves, which goes over to it between two frames."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_runtime.equipping import EquippedBox
from edge_runtime.frames.results import BUNDLE_DIGITS
from edge_runtime.reloading.differences import changes_text
from edge_runtime.reloading.steps import Asked, Checked, Ended, Event, Phase, Refused, State, TakenUp, Told, step
from edge_runtime.reloading.workplace import AtWork, Successor, Workplace
from edge_runtime.serving.switching import Switching
from models.errors import message_of

if TYPE_CHECKING:
    from edge_runtime.serving.inference import Inference

SWITCH_S = 0.0005
"""How often the interpreter changes threads during a check. A run of a network takes and leaves it hundreds of times;
waiting the usual 5 ms for it each time would make a run many times as long (seen here: 755 ms for 20, and 100 so).
"""
SETTLE_S = 5.0
"""How long sinks that are gone may take to deliver what waits for them."""

log = logging.getLogger("gemel.run")

Refit = Callable[[AtWork], EquippedBox | None]
"""Opens, fits and equips the box anew, as config and bundle are now; None where they are what is at work.

Raises InputError where anything is wrong with them.
"""


@dataclass(frozen=True, eq=False)
class _Taken:
    """What was taken up, and what was at work before."""

    successor: Successor
    before: AtWork
    switching_before: Switching
    switching: Switching


class Reloads:
    """Whoever asks gets the outcome: None where it was applied, else the reason. `state` counts them.

    `notify` is told whether a reload is under way, `applied` of the box that serves from now on.
    """

    def __init__(
        self,
        workplace: Workplace,
        refit: Refit,
        notify: Callable[[bool], object] = lambda _: None,
        applied: Callable[[EquippedBox], object] = lambda _: None,
    ) -> None:
        self.state = State()
        self._workplace, self._refit, self._notify, self._applied = workplace, refit, notify, applied
        self._futures: dict[int, Future[str | None]] = {}
        self._tickets = itertools.count()
        self._changed = threading.Condition()
        self._ready: Successor | None = None
        self._taken: _Taken | None = None
        self._thread = threading.Thread(target=self._work, name="reloads", daemon=True)

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()

    def ask(self) -> Future[str | None]:
        """Ask for a reload; from any thread."""
        with self._changed:
            ticket = next(self._tickets)
            future = self._futures[ticket] = Future()
            self._go(Asked(ticket))
        return future

    def take_up(self, inference: Inference) -> None:
        """Go over to what is ready, if anything is; called between two frames by the thread that runs queries."""
        if self._ready is None:
            return
        with self._changed:
            successor, self._ready = self._ready, None
            if successor is None:
                return
            started, before, old = time.monotonic(), self._workplace.now, inference.switching
            self._workplace.go_over(successor)
            inference.follow(Switching(successor.work.box).after(old))
            log.info(
                "reloaded: bundle %s, %s; frames waited %.0f ms",
                successor.work.identity.bundle[:BUNDLE_DIGITS],
                changes_text(before.queries, successor.work.queries),
                1000 * (time.monotonic() - started),
            )
            self._taken = _Taken(successor, before, old, inference.switching)
            self._go(TakenUp())

    def stop(self) -> None:
        """No more; whoever waits is told so."""
        with self._changed:
            self._go(Ended())
            if self._ready is not None:
                self._workplace.drop(self._ready)
                self._ready = None
            self._changed.notify_all()

    def _work(self) -> None:
        while self._waits_for(lambda: self.state.phase is Phase.CHECKING):
            self._notify(True)
            with _giving_way():
                found = self._checked()
            if isinstance(found, Successor):
                self._hand_over(found)
            else:
                with self._changed:
                    self._go(found)
            self._notify(False)

    def _waits_for(self, what: Callable[[], object]) -> bool:
        """Wait for it; False where the box stops before."""
        with self._changed:
            self._changed.wait_for(lambda: what() or self.state.phase is Phase.ENDED)
            return self.state.phase is not Phase.ENDED

    def _checked(self) -> Successor | Refused | Checked:
        try:
            box = self._refit(self._workplace.now)
            if box is not None:
                return self._workplace.prepare(box)
        except (Exception, SystemExit) as error:  # what a bundle names is imported, and may do anything
            reason = message_of(error)
            log.error("not reloaded, the box serves on as it is: %s", reason)
            return Refused(reason)
        log.info("reloaded: nothing has changed")
        return Checked(changes=False)

    def _hand_over(self, successor: Successor) -> None:
        with self._changed:
            self._taken, self._ready = None, successor
            self._go(Checked())
            if self.state.phase is Phase.ENDED:
                self._ready = None
                self._workplace.drop(successor)
        self._workplace.mailboxes.nudge()
        if self._waits_for(lambda: self._taken) and self._taken is not None:
            try:
                self._settle(self._taken)
            except Exception:  # the box serves, and must hear of the next reload
                log.exception("a reload was applied, and something beside it failed")
        self._taken = None

    def _settle(self, taken: _Taken) -> None:
        """What need not be done between two frames."""
        taken.before.vigil.stop()
        taken.successor.work.vigil.start()
        taken.switching_before.stop()
        taken.switching.start()
        self._applied(taken.successor.work.box)
        hanging = self._workplace.post.settle(taken.successor.rounds, SETTLE_S)
        if hanging:
            log.warning("not waited for: %s", ", ".join(hanging))

    def _go(self, event: Event) -> None:
        """Take a step, and do what it asks for; the lock is held."""
        self.state, do = step(self.state, event, time.monotonic())
        if do.told is not None:
            self._tell(do.told)
        self._changed.notify_all()

    def _tell(self, told: Told) -> None:
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
