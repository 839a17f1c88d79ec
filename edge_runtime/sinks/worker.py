"""The outbox of one sink: what waits for it, what is given up for want of room, and when to try again.

Pure bookkeeping: no thread, no clock, no file. The same events at the same moments leave the same state, and at every
moment offered = delivered + undelivered + queued.

A courier: the thread that carries what is in one sink's outbox to the sink.

The post: every result to every sink.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from edge_runtime.backoff import BackOff
from edge_runtime.sinks.base import GONE, DeliveryError, ResultMessage, Sink, SinkClosed, SinkConfig, to_delivery_error
from models.errors import one_line

if TYPE_CHECKING:
    from typing_extensions import Self


OVERFLOW = "overflow"
STOPPED = "stopped"
BACK_OFF = BackOff(0.25, 10.0)


class Weighty(Protocol):
    """What can be offered: it says what it holds, and can do with less."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        ...

    def lighter(self) -> Self:
        """The same without what it can do without (its picture); itself where there is nothing such."""
        ...


Item = TypeVar("Item", bound=Weighty)


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """How many items wait at most, with how many bytes, and how often one is tried that the sink answers with an error
    of its own.
    """

    items: int = 1000
    nbytes: int = 32 * 2**20
    tries: int = 8


class Outbox(Generic[Item]):
    """A queue that drops its oldest item when it is full, and rests after failures.

    Pictures go before records: over the bytes allowed, the oldest items are made lighter first. What is dropped counts
    under the reason for which the sink takes nothing at present, or as `overflow` where it is only too slow. `chance`
    gives random numbers in [0, 1).
    """

    def __init__(
        self,
        bounds: OutboxLimits | None = None,
        back_off: BackOff = BACK_OFF,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.bounds = bounds or OutboxLimits()
        self.offered = self.delivered = 0
        self.undelivered: Counter[str] = Counter()
        self.trouble: str | None = None
        self.closed = False
        self._back_off, self._chance = back_off, chance
        self._light: deque[Item] = deque()  # all older than those in `_whole`
        self._whole: deque[Item] = deque()
        self._sending: list[Item] = []
        self._nbytes = self._failures = self._tries = 0
        self._ready_at = -math.inf

    @property
    def queued(self) -> int:
        """Items that are neither delivered nor given up, those being sent included."""
        return len(self._light) + len(self._whole) + len(self._sending)

    @property
    def nbytes(self) -> int:
        """Bytes of what waits."""
        return self._nbytes

    @property
    def balanced(self) -> bool:
        """Whether every item is accounted for."""
        return self.offered == self.delivered + self.undelivered.total() + self.queued

    def offer(self, item: Item) -> None:
        """One more; the oldest goes where there is no room for it."""
        self.offered += 1
        if self.closed:
            self.undelivered[self.trouble or STOPPED] += 1
            return
        self._whole.append(item)
        self._nbytes += item.nbytes
        self._trim()

    def wait_s(self, now: float) -> float:
        """Seconds until something should be sent: 0 now, infinity while nothing waits."""
        return max(0.0, self._ready_at - now) if self._light or self._whole else math.inf

    def rests(self, now: float) -> bool:
        """Whether it is too early to try anything again."""
        return now < self._ready_at

    def hurry(self) -> None:
        """Rest no longer: the end is near."""
        self._ready_at = -math.inf

    def take(self, most: int, now: float) -> list[Item]:
        """The oldest items, `most` at most, to be sent now; none while it rests."""
        if self.closed or self._sending or self.rests(now):
            return []
        while len(self._sending) < most and (self._light or self._whole):
            item = (self._light or self._whole).popleft()
            self._nbytes -= item.nbytes
            self._sending.append(item)
        return list(self._sending)

    def sent(self) -> None:
        """All that was taken has been delivered, or it was seen otherwise that the sink is well."""
        self._deliver(len(self._sending))
        self.trouble, self._failures, self._tries, self._ready_at = None, 0, 0, -math.inf

    def failed(self, reason: str, now: float, delivered: int = 0, answered: bool = False) -> None:
        """The sink is in trouble: the first `delivered` of what was taken were delivered, the rest waits.

        `answered`: the sink is there and does not get along with this item, so that this counts as one of its tries.
        """
        if self.closed:
            return
        if delivered:
            self._deliver(delivered)
            self._failures = self._tries = 0
        self.trouble = reason
        self._failures += 1
        self._tries += answered
        if self._tries >= self.bounds.tries and self._sending:
            self.refused(reason)
        self._put_back()
        self._ready_at = now + self._back_off.wait_s(self._failures, self._chance())

    def refused(self, reason: str, delivered: int = 0) -> None:
        """The item after the first `delivered` will never be taken: it is given up, the rest waits."""
        if self.closed:
            return
        self._deliver(delivered)
        if self._sending:
            self._sending.pop(0)
            self.undelivered[reason] += 1
        self._tries = 0
        self._put_back()

    def close(self) -> None:
        """Give up what waits; nothing is taken any more."""
        self.undelivered[self.trouble or STOPPED] += self.queued
        self.undelivered += Counter()  # keeps what is above zero
        self.closed = True
        self._light.clear()
        self._whole.clear()
        self._sending.clear()
        self._nbytes = 0

    def _deliver(self, count: int) -> None:
        self.delivered += len(self._sending[:count])
        del self._sending[:count]

    def _put_back(self) -> None:
        items, self._sending = self._sending, []
        if self._light:
            items = [item.lighter() for item in items]
            self._light.extendleft(reversed(items))
        else:
            self._whole.extendleft(reversed(items))
        self._nbytes += sum(item.nbytes for item in items)
        self._trim()

    def _trim(self) -> None:
        while self._nbytes > self.bounds.nbytes and self._whole:
            item = self._whole.popleft()
            lighter = item.lighter()
            self._light.append(lighter)
            self._nbytes += lighter.nbytes - item.nbytes
        while len(self._light) + len(self._whole) > self.bounds.items or self._nbytes > self.bounds.nbytes:
            self._nbytes -= (self._light or self._whole).popleft().nbytes
            self.undelivered[self.trouble or OVERFLOW] += 1


UP, DOWN, STARTING = "up", "down", "starting"
TEND_S = 1.0
"""How often a sink is looked after while nothing is to be delivered."""

log = logging.getLogger("gemel.run")


class SinkWorker:
    """Offers never wait; whatever the sink does, or does not, only its own results are the later or the fewer.

    The log tells when the sink stops and when it begins again to take results.
    """

    def __init__(
        self,
        config: SinkConfig,
        outbox: Outbox[ResultMessage] | None = None,
        clock: Callable[[], float] = time.monotonic,
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

    def offer(self, parcel: ResultMessage) -> None:
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
            except SinkClosed as error:
                self._gone(error)
                break
            except Exception as error:
                met = to_delivery_error(error)
                opened = opened and met.stays_open
                if not opened:
                    self._let_go()
                self._missed(met)
            else:
                self._well()
        self._let_go()

    def _next(self, opened: bool) -> list[ResultMessage] | None:
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

    def _missed(self, error: DeliveryError) -> None:
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

    def _gone(self, error: SinkClosed) -> None:
        with self._changed:
            self._said, self.is_gone = str(error), True
            self._outbox.failed(GONE, self._clock())
            self._outbox.close()
        log.warning("sink %s: %s; it is left out", self.config.name, error)

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()


@dataclass(frozen=True, eq=False)
class SinkChange:
    """The couriers of another config: those `kept` among them go on as they are, those `gone` are to end."""

    couriers: tuple[SinkWorker, ...]
    fresh: tuple[SinkWorker, ...]
    gone: tuple[SinkWorker, ...]


class SinkManager:
    """Hands results to all sinks; never waits for any of them."""

    def __init__(self, sinks: Sequence[SinkConfig], courier: Callable[[SinkConfig], SinkWorker] = SinkWorker) -> None:
        self._couriers, self._courier = tuple(courier(config) for config in sinks), courier
        self._past: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Begin to deliver."""
        for courier in self._couriers:
            courier.start()

    def offer(self, parcel: ResultMessage) -> None:
        """A result for every sink."""
        for courier in self._couriers:
            courier.offer(parcel)

    def prepare(self, sinks: Sequence[SinkConfig]) -> SinkChange:
        """Couriers for other sinks; a sink that stays as it is keeps its own, with all that waits."""
        left = list(self._couriers)
        couriers, fresh = [], []
        for config in sinks:
            kept = next((courier for courier in left if courier.config == config), None)
            if kept is None:
                fresh.append(kept := self._courier(config))
            else:
                left.remove(kept)
            couriers.append(kept)
        return SinkChange(tuple(couriers), tuple(fresh), tuple(left))

    def take(self, rounds: SinkChange) -> None:
        """Results go to these from now on; what is offered to fresh ones waits until `settle`."""
        self._couriers = rounds.couriers

    def settle(self, rounds: SinkChange, timeout_s: float) -> list[str]:
        """Let those that are gone deliver what they can in so many seconds, then let the fresh ones begin.

        One after the other, since both may write to one file. Returns the names of the sinks that hang.
        """
        ends = time.monotonic() + timeout_s
        for courier in rounds.gone:
            courier.close()
        hanging = [courier.config.name for courier in rounds.gone if not courier.join(ends - time.monotonic())]
        for courier in rounds.gone:
            self._remember(courier.config.name, courier.to_json())
        for courier in rounds.fresh:
            courier.start()
        return hanging

    def past_json(self) -> list[dict[str, Any]]:
        """What became of the results of sinks that are gone: `name`, `delivered`, `undelivered`."""
        return [{"name": name, **counts} for name, counts in self._past.items()]

    def _remember(self, name: str, row: Mapping[str, Any]) -> None:
        before = self._past.get(name, {"delivered": 0, "undelivered": {}})
        lost = Counter(before["undelivered"]) + Counter(row["undelivered"])
        self._past[name] = {
            "delivered": before["delivered"] + row["delivered"],
            "undelivered": dict(sorted(lost.items())),
        }

    @property
    def is_unheard(self) -> bool:
        """Whether whoever read the results has gone, and nobody else is left."""
        return bool(self._couriers) and all(courier.is_gone for courier in self._couriers)

    @property
    def complaints(self) -> list[str]:
        """What sinks did not take, a line for each of them."""
        return [said for courier in self._couriers if (said := courier.complaint) is not None]

    def reopen(self) -> None:
        """Files and connections are opened anew, soon; may be called anywhere but in a signal handler."""
        for courier in self._couriers:
            courier.reopen()

    def close(self, timeout_s: float) -> list[str]:
        """Deliver what waits within so many seconds, and give up the rest; the names of the sinks that hang."""
        ends = time.monotonic() + timeout_s
        for courier in self._couriers:
            courier.close()
        return [courier.config.name for courier in self._couriers if not courier.join(ends - time.monotonic())]

    def to_json(self) -> list[dict[str, Any]]:
        """One record per sink (`Courier.to_json`)."""
        return [courier.to_json() for courier in self._couriers]
