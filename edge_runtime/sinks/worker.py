"""Delivery: an outbox and a worker thread for each sink, and the manager that hands every result to all of them."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.frames.part_times import PART_TIMES, Part
from gemel.edge_runtime.sinks.base import (
    BoxState,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkClosed,
    SinkConfig,
    Switch,
    Undelivered,
    to_delivery_error,
)
from gemel.models.errors import one_line

UP, DOWN, STARTING = "up", "down", "starting"
BACK_OFF = BackOff(0.25, 10.0)
HEARTBEAT_S = 1.0
"""Interval of heartbeats while nothing is to be delivered."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Most messages and bytes that wait, and attempts at a message that the sink answers with an error."""

    messages: int = 1000
    nbytes: int = 32 * 2**20
    attempts: int = 8


class Outbox:
    """The queue of one sink: drops its oldest message when full, and pauses after failures.

    Pure bookkeeping without thread or clock; always offered = delivered + undelivered + queued. Over the byte limit the
    oldest messages lose their images first. Dropped messages count under the reason for which the sink fails at
    present, or as overflow; those being sent are never dropped. `chance` gives random numbers in [0, 1).
    """

    def __init__(
        self,
        limits: OutboxLimits | None = None,
        back_off: BackOff = BACK_OFF,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits or OutboxLimits()
        self.offered = self.delivered = self.nbytes = 0
        self.undelivered: Counter[Undelivered] = Counter()
        self.trouble: Undelivered | None = None
        self.closed = False
        self._back_off, self._chance = back_off, chance
        self._messages: deque[ResultMessage] = deque()
        self._sending = self._failures = self._attempts = 0
        self._ready_at = -math.inf

    @property
    def queued(self) -> int:
        """Messages neither delivered nor dropped, those being sent included."""
        return len(self._messages)

    def offer(self, message: ResultMessage) -> None:
        """Append a message; the oldest is dropped where there is no space."""
        self.offered += 1
        self._messages.append(message)
        self.nbytes += message.nbytes
        if self.closed:
            self.close()
        else:
            self._trim()

    def pause_s(self, now: float) -> float:
        """Seconds until the next attempt is allowed."""
        return max(0.0, self._ready_at - now)

    def end_pause(self) -> None:
        """Allow the next attempt at once."""
        self._ready_at = -math.inf

    def take(self, count: int) -> list[ResultMessage]:
        """Up to `count` of the oldest messages, to be sent now; `confirm`, `fail` or `reject` must follow."""
        self._sending = min(count, len(self._messages))
        return [self._messages[index] for index in range(self._sending)]

    def confirm(self) -> None:
        """All taken messages were delivered, or the sink proved healthy otherwise."""
        self._deliver(self._sending)
        self._sending = self._failures = self._attempts = 0
        self.trouble = None
        self.end_pause()

    def fail(
        self, reason: Undelivered, now: float, delivered: int = 0, answered: bool = False, wait_s: float = 0.0
    ) -> None:
        """The sink failed after `delivered` of the taken messages; the rest is retried after at least `wait_s`.

        `answered`: the sink works and rejects this message, which counts as one of its attempts.
        """
        if self._deliver(delivered):
            self._failures = self._attempts = 0
        self.trouble = reason
        self._failures += 1
        self._attempts += answered
        if self._attempts >= self.limits.attempts:
            self.reject(reason)
        self._sending = 0
        self._ready_at = now + max(wait_s, self._back_off.wait_s(self._failures, self._chance()))
        self._trim()

    def reject(self, reason: Undelivered, delivered: int = 0) -> None:
        """The message after the first `delivered` will never be taken: it is dropped, the rest waits."""
        self._deliver(delivered)
        if self._sending:
            self._drop(0, reason)
        self._sending = self._attempts = 0
        self._trim()

    def close(self) -> None:
        """Drop what waits, and all that is offered later."""
        self.closed, self._sending = True, 0
        while self._messages:
            self._drop(0, self.trouble or Undelivered.STOPPED)

    def _deliver(self, count: int) -> int:
        count = min(count, self._sending)
        for _ in range(count):
            self.nbytes -= self._messages.popleft().nbytes
        self.delivered += count
        self._sending -= count
        return count

    def _drop(self, index: int, reason: Undelivered) -> None:
        self.nbytes -= self._messages[index].nbytes
        del self._messages[index]
        self.undelivered[reason] += 1

    def _trim(self) -> None:
        for index, message in enumerate(self._messages):
            if self.nbytes <= self.limits.nbytes:
                break
            self._messages[index] = message.without_image()
            self.nbytes -= message.nbytes - self._messages[index].nbytes
        while len(self._messages) > self._sending and (
            len(self._messages) > self.limits.messages or self.nbytes > self.limits.nbytes
        ):
            self._drop(self._sending, self.trouble or Undelivered.OVERFLOW)


class SinkWorker:
    """The thread that sends one sink's outbox. `offer` never waits; a slow or failing sink affects only itself."""

    def __init__(
        self,
        config: SinkConfig,
        outbox: Outbox | None = None,
        state: Callable[[], BoxState] = BoxState,
        switch: Switch | None = None,
    ) -> None:
        self.config, self._state = config, state
        self._outbox = outbox or Outbox()
        self._sink: Sink = config.build()
        if switch is not None:
            self._sink.switch = switch
        self._changed = threading.Condition()
        self._closing = self._reopening = self._is_up = False
        self._message = self._rejection = ""
        self.is_gone = False
        """Whether the reader of this sink has gone for good."""
        self._thread = threading.Thread(target=self._work, name=f"sink-{config.kind}", daemon=True)

    def start(self) -> None:
        """Begin to deliver, once."""
        if self._thread.ident is None:
            self._thread.start()

    def offer(self, message: ResultMessage) -> None:
        """Queue a result."""
        with self._changed:
            self._outbox.offer(message if self.config.wants_images else message.without_image())
            self._changed.notify()

    def reopen(self) -> None:
        """Reopen files and connections soon."""
        self._reopening = True
        self._end_pause()

    def close(self) -> None:
        """Deliver what waits if the sink takes it at once, then end; returns at once."""
        self._closing = True
        self._end_pause()

    def _end_pause(self) -> None:
        with self._changed:
            self._outbox.end_pause()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end and drop what is not delivered by then; False where the sink hangs."""
        if self._thread.ident is not None:  # one made for a reload may not have been started
            self._thread.join(max(0.0, timeout_s))
        with self._changed:
            self._outbox.close()
        return not self._thread.is_alive()

    @property
    def complaint(self) -> str | None:
        """One line on the results that were not delivered because of a failure, or None."""
        with self._changed:
            lost = self._outbox.undelivered
            if not lost or self.is_gone or self._outbox.trouble is None:
                return None
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
            because = f" ({self._message})" if self._message else ""
            return one_line(f"{self.config.name}: results not delivered: {counts}{because}")

    def to_json(self) -> dict[str, Any]:
        """Kind, state (`up`, `down`, or `starting`), counts by outcome, queued messages, the present error."""
        with self._changed:
            state = DOWN if self._outbox.trouble else UP if self._is_up else STARTING
            return {
                "kind": self.config.kind, "state": state, "delivered": self._outbox.delivered,
                "undelivered": {str(reason): count for reason, count in sorted(self._outbox.undelivered.items())},
                "queued": self._outbox.queued, "trouble": self._message or None,
            }  # fmt: skip

    def _work(self) -> None:
        is_open, report_at = False, -math.inf
        while (messages := self._next_batch(is_open)) is not None:
            if self._reopening:
                self._reopening = is_open = False
                self._close_sink()
            try:
                if not is_open:
                    self._sink.open()
                    is_open, report_at = True, -math.inf
                # The state takes longer to tell than a result, so not with each of them.
                if (now := time.monotonic()) >= report_at:
                    self._sink.report_state(self._state())
                    report_at = now + HEARTBEAT_S
                if messages:
                    with PART_TIMES.count(Part.SINKS):
                        self._sink.write(messages)
                else:
                    self._sink.heartbeat()
            except SinkClosed as error:
                self._end(error)
                break
            except Exception as error:
                failure = to_delivery_error(error)
                is_open = is_open and failure.keeps_open
                if not is_open:
                    self._close_sink()
                self._note_failure(failure)
            else:
                self._note_success()
        self._close_sink()

    def _next_batch(self, is_open: bool) -> list[ResultMessage] | None:
        """Messages to deliver; an empty list where the sink is to be opened or checked; None at the end."""
        with self._changed:
            heartbeat_at = time.monotonic() + HEARTBEAT_S
            while not self._outbox.closed:
                now = time.monotonic()
                pause_s = self._outbox.pause_s(now)
                if not pause_s and (messages := self._outbox.take(self._sink.batch)):
                    return messages
                if self._closing:
                    return None
                if not pause_s and (self._reopening or not is_open or now >= heartbeat_at):
                    return []
                self._changed.wait(min(pause_s or HEARTBEAT_S, HEARTBEAT_S))
            return None

    def _note_success(self) -> None:
        with self._changed:
            self._is_up = True
            before, self._message = self._message, ""
            self._outbox.confirm()
            lost = self._outbox.undelivered.total()
        if before:
            log.info("sink %s works again; %d results were lost since the start", self.config.name, lost)

    def _note_failure(self, error: DeliveryError) -> None:
        with self._changed:
            text = one_line(error)
            if error.permanent:
                is_news, self._rejection = self._rejection != text, text
                self._outbox.reject(error.reason, error.delivered)
            else:
                is_news, self._message = self._outbox.trouble != error.reason, text
                self._outbox.fail(error.reason, time.monotonic(), error.delivered, error.answered, error.wait_s)
        if is_news:
            log.error("sink %s %s: %s", self.config.name, "rejects a result" if error.permanent else "failed", text)

    def _end(self, error: SinkClosed) -> None:
        with self._changed:
            self._message, self.is_gone = str(error), True
            self._outbox.fail(Undelivered.GONE, time.monotonic())
            self._outbox.close()
        log.warning("sink %s is closed: %s", self.config.name, error)

    def _close_sink(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()


class SinkManager:
    """Hands every result to all sinks, which also get the `state` of the box and may `switch` its cameras and queries;
    never waits for any of them."""

    def __init__(
        self, sinks: Sequence[SinkConfig], state: Callable[[], BoxState] = BoxState, switch: Switch | None = None
    ) -> None:
        self._state, self._switch = state, switch
        self._workers = tuple(SinkWorker(config, state=state, switch=switch) for config in sinks)
        self._gone: list[SinkWorker] = []
        self._delivered_before: Counter[str] = Counter()
        self._undelivered_before: dict[str, Counter[str]] = {}

    def start(self) -> None:
        """Begin to deliver."""
        for worker in self._workers:
            worker.start()

    def offer(self, message: ResultMessage) -> None:
        """Queue a result for every sink."""
        for worker in self._workers:
            worker.offer(message)

    def change(self, sinks: Sequence[SinkConfig]) -> None:
        """Send results to these sinks from now on; new ones queue them until `settle`.

        An unchanged sink keeps its worker and its queue.
        """
        self._gone, workers = list(self._workers), []
        for config in sinks:
            kept = next((worker for worker in self._gone if worker.config == config), None)
            if kept is not None:
                self._gone.remove(kept)
            workers.append(kept or SinkWorker(config, state=self._state, switch=self._switch))
        self._workers = tuple(workers)

    def settle(self, timeout_s: float) -> list[str]:
        """Drain the workers that are gone, then start the new ones: both may write to one file.

        Returns the names of the sinks that hang.
        """
        hanging = _close_all(self._gone, timeout_s)
        for worker in self._gone:
            name, row = worker.config.name, worker.to_json()
            self._delivered_before[name] += row["delivered"]
            self._undelivered_before.setdefault(name, Counter()).update(row["undelivered"])
        self._gone = []
        self.start()
        return hanging

    def past_json(self) -> list[dict[str, Any]]:
        """Counts of sinks removed by reloads: `name`, `delivered`, `undelivered`."""
        return [
            {"name": name, "delivered": self._delivered_before[name], "undelivered": dict(sorted(lost.items()))}
            for name, lost in self._undelivered_before.items()
        ]

    @property
    def is_unread(self) -> bool:
        """Whether the readers of all sinks have gone for good."""
        return bool(self._workers) and all(worker.is_gone for worker in self._workers)

    @property
    def complaints(self) -> list[str]:
        """One line for each sink that failed to take results."""
        return [text for worker in self._workers if (text := worker.complaint) is not None]

    def reopen(self) -> None:
        """Reopen files and connections soon."""
        for worker in self._workers:
            worker.reopen()

    def close(self, timeout_s: float) -> list[str]:
        """Deliver what waits within `timeout_s` and drop the rest; the names of the sinks that hang."""
        return _close_all(self._workers, timeout_s)

    def to_json(self) -> list[dict[str, Any]]:
        """One record per sink (`SinkWorker.to_json`)."""
        return [worker.to_json() for worker in self._workers]


def _close_all(workers: Sequence[SinkWorker], timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.close()
    return [worker.config.name for worker in workers if not worker.join(deadline - time.monotonic())]
