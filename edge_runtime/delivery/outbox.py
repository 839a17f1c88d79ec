"""The outbox of one sink: what waits for it, what is given up for want of room, and when to try again.

Pure bookkeeping: no thread, no clock, no file. The same events at the same moments leave the same state, and at every
moment offered = delivered + undelivered + queued.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from edge_runtime.backoff import BackOff

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
class Bounds:
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
        self, bounds: Bounds | None = None, back_off: BackOff = BACK_OFF, chance: Callable[[], float] = random.random
    ) -> None:
        self.bounds = bounds or Bounds()
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
