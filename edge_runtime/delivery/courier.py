"""A courier: the thread that carries what is in one sink's outbox to the sink."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_runtime.delivery.base import GONE, Closed, NotTaken, Sink, SinkConfig, not_taken
from edge_runtime.delivery.outbox import Outbox
from edge_runtime.delivery.parcel import Parcel
from models.errors import one_line

UP, DOWN, STARTING = "up", "down", "starting"
TEND_S = 1.0
"""How often a sink is looked after while nothing is to be delivered."""

log = logging.getLogger("gemel.run")


class Courier:
    """Offers never wait; whatever the sink does, or does not, only its own results are the later or the fewer.

    The log tells when the sink stops and when it begins again to take results.
    """

    def __init__(
        self, config: SinkConfig, outbox: Outbox[Parcel] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self._clock = config, clock
        self._outbox = outbox or Outbox()
        self._sink: Sink = config.made()
        self._changed = threading.Condition()
        self._closing = self._anew = self._ready = False
        self._said = self._refusal = ""
        self._lost = 0
        self.is_gone = False
        self._thread = threading.Thread(target=self._work, name=f"sink-{config.kind}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def offer(self, parcel: Parcel) -> None:
        """Take a result to be delivered."""
        with self._changed:
            self._outbox.offer(parcel if self.config.wants_images else parcel.lighter())
            self._changed.notify()

    def reopen(self) -> None:
        """Open files and connections anew, soon."""
        with self._changed:
            self._anew = True
            self._outbox.hurry()
            self._changed.notify()

    def close(self) -> None:
        """Deliver what waits, if the sink takes it at once, and end; returns without waiting for that."""
        with self._changed:
            self._closing = True
            self._outbox.hurry()
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; what is not delivered by then is given up. False where the sink hangs."""
        if self._thread.ident is not None:  # one that came with a reload may not have begun
            self._thread.join(max(0.0, timeout_s))
        with self._changed:
            self._outbox.close()
        return not self._thread.is_alive()

    @property
    def complaint(self) -> str | None:
        """What the sink did not take, in one line; None where that is nothing."""
        with self._changed:
            lost = self._outbox.undelivered
            if not lost or self.is_gone or self._outbox.trouble is None:
                return None
            counted = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
            because = f" ({self._said})" if self._said else ""
            return one_line(f"{self.config.name}: results not delivered: {counted}{because}")

    def to_json(self) -> dict[str, Any]:
        """Kind, state (`up`, `down`, or `starting`), what was delivered and what was not by reason, what waits."""
        with self._changed:
            state = DOWN if self._outbox.trouble else UP if self._ready else STARTING
            return {
                "kind": self.config.kind, "state": state, "delivered": self._outbox.delivered,
                "undelivered": dict(sorted(self._outbox.undelivered.items())), "queued": self._outbox.queued,
                "trouble": self._said or None,
            }  # fmt: skip

    def _work(self) -> None:
        opened = False
        while (parcels := self._next(opened)) is not None:
            if self._anew:
                self._anew = opened = False
                self._let_go()
            try:
                if not opened:
                    self._sink.open()
                    opened = True
                if parcels:
                    self._sink.write(parcels)
                else:
                    self._sink.tend()
            except Closed as error:
                self._gone(error)
                break
            except Exception as error:
                met = not_taken(error)
                opened = opened and met.stays_open
                if not opened:
                    self._let_go()
                self._missed(met)
            else:
                self._well()
        self._let_go()

    def _next(self, opened: bool) -> list[Parcel] | None:
        """What to deliver now; nothing, where the sink is to be opened or looked after; None at the end."""
        with self._changed:
            tended = self._clock() + TEND_S
            while True:
                now = self._clock()
                parcels = self._outbox.take(self._sink.batch, now)
                if parcels:
                    return parcels
                if self._closing or self._outbox.closed:
                    return None
                if not self._outbox.rests(now) and (self._anew or not opened or now >= tended):
                    return []
                self._changed.wait(min(self._outbox.wait_s(now), TEND_S))

    def _well(self) -> None:
        with self._changed:
            self._ready = True
            was, self._said = self._said, ""
            self._outbox.sent()
            lost, self._lost = self._outbox.undelivered.total() - self._lost, self._outbox.undelivered.total()
        if was:
            log.info("sink %s takes results again; %d were lost meanwhile", self.config.name, lost)

    def _missed(self, error: NotTaken) -> None:
        with self._changed:
            said = one_line(error)
            if error.for_good:
                tell, self._refusal = self._refusal != said, said
                self._outbox.refused(error.reason, error.delivered)
            else:
                tell, self._said = self._outbox.trouble != error.reason, said
                self._outbox.failed(error.reason, self._clock(), error.delivered, error.answered)
        if tell:
            log.error("sink %s %s: %s", self.config.name, "refuses one" if error.for_good else "takes nothing", said)

    def _gone(self, error: Closed) -> None:
        with self._changed:
            self._said, self.is_gone = str(error), True
            self._outbox.failed(GONE, self._clock())
            self._outbox.close()
        log.warning("sink %s: %s; it is left out", self.config.name, error)

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()
