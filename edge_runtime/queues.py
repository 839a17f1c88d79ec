"""The ledger: what became of every frame, per query, adding up at every moment.

Mailboxes: for each query the few frames that wait and can still be in time.

The intake: frames on their way from cameras to mailboxes; each query takes those of one camera.

How fast scenes change, from which follows what a stale result costs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy as np


REPLACED = "replaced"
DEADLINE = "deadline"
MEMORY = "memory"
PAUSED = "paused"
RELOADED = "reload"


@dataclass(slots=True)
class FrameCounts:
    """One query's frames. `pending` is counted on its own, so that the sum can be checked and not only derived."""

    received: int = 0
    processed: int = 0
    late: int = 0
    failed: int = 0
    pending: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def balanced(self) -> bool:
        """Whether received = processed + dropped + failed + pending, none of them negative."""
        settled = self.processed + self.dropped.total() + self.failed
        return self.pending >= 0 and self.received == settled + self.pending

    def to_json(self) -> dict[str, Any]:
        return {
            "received": self.received,
            "processed": self.processed,
            "late": self.late,
            "failed": self.failed,
            "pending": self.pending,
            "dropped": dict(sorted(self.dropped.items())),
        }


class Ledger:
    """Counts frames of all queries; safe to use from several threads.

    Every frame is received once and settled at most once: processed, dropped for a reason, or failed. Settling a
    frame that is not pending raises RuntimeError, since a count that no longer adds up must not go unnoticed.
    """

    def __init__(self, queries: Iterable[str]) -> None:
        self._accounts = {query: FrameCounts() for query in queries}
        self._lock = threading.Lock()

    def add(self, queries: Iterable[str]) -> None:
        """These have accounts from now on; one that had gone goes on with its own."""
        with self._lock:
            self._accounts.update({query: FrameCounts() for query in queries if query not in self._accounts})

    def received(self, query: str) -> None:
        with self._lock:
            account = self._accounts[query]
            account.received += 1
            account.pending += 1

    def processed(self, query: str, late: bool = False) -> None:
        with self._lock:
            account = self._settle(query)
            account.processed += 1
            account.late += late

    def dropped(self, query: str, reason: str) -> None:
        with self._lock:
            self._settle(query).dropped[reason] += 1

    def failed(self, query: str) -> None:
        with self._lock:
            self._settle(query).failed += 1

    def _settle(self, query: str) -> FrameCounts:
        account = self._accounts[query]
        if account.pending < 1:
            raise RuntimeError(f"query {query}: a frame was settled that was not pending")
        account.pending -= 1
        return account

    @property
    def balanced(self) -> bool:
        """Whether every query's account adds up."""
        with self._lock:
            return all(account.balanced for account in self._accounts.values())

    def pending(self, query: str) -> int:
        """Frames of a query that are received and not settled."""
        with self._lock:
            return self._accounts[query].pending

    def to_json(self) -> list[dict[str, Any]]:
        """One record per query: `query`, received, processed (of which late), failed, pending, dropped by reason."""
        with self._lock:
            return [{"query": query, **account.to_json()} for query, account in self._accounts.items()]


DEPTH = 8
"""Frames of one query that wait at most: as many as the largest batch takes."""
MAX_WAITING_BYTES = 256 * 2**20
"""Bytes of all the pictures that wait, beside the budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame on its way to a query.

    `index` counts the camera's frames from 0, skipped ones included. `captured_at` is in seconds of the clock
    that the schedule runs by; `captured_unix` is the same moment in Unix seconds. `image` is RGB uint8 (H, W, 3),
    None on the virtual clock.
    """

    index: int
    captured_at: float
    captured_unix: float = 0.0
    image: np.ndarray | None = None


class Mailboxes:
    """One short queue per query, entered in the ledger under the same lock; safe between threads.

    `depth` is how many frames of a query may wait, one number or one per query, and `most_bytes` what the pictures of
    all may hold together; one that several queries wait with counts once. Whether a waiting frame can still be in time
    is for the schedule to say, which drops it then; here only the room ends.
    """

    def __init__(
        self,
        queries: Iterable[str],
        ledger: Ledger,
        depth: int | Mapping[str, int] = DEPTH,
        heard: Callable[[str, Frame], None] | None = None,
        most_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._waiting: dict[str, deque[Frame]] = {query: deque() for query in queries}
        self._depth = dict(depth) if isinstance(depth, Mapping) else dict.fromkeys(self._waiting, depth)
        self._ledger = ledger
        self._heard = heard
        self._changed = threading.Condition()
        self._nudged = self._unseen = False
        self.most_bytes = most_bytes
        self.nbytes = self.max_bytes = 0
        self._pictures: dict[int, int] = {}

    def put(self, query: str, frame: Frame) -> Frame | None:
        """Leave a frame; returns the oldest waiting one if there was no room left, which counts as dropped.

        `heard` is told of every frame, in the order in which a snapshot sees them. Where the pictures become too many
        bytes, the oldest goes, for every query that waits with it.
        """
        with self._changed:
            waiting, oldest = self._waiting[query], None
            if len(waiting) >= self._depth[query]:
                oldest = self._gone(waiting.popleft())
                self._ledger.dropped(query, REPLACED)
            waiting.append(self._came(frame))
            self._ledger.received(query)
            if self._heard is not None:
                self._heard(query, frame)
            while self.nbytes > self.most_bytes and len(self._pictures) > 1:
                self._drop_oldest_picture()
            self.max_bytes = max(self.max_bytes, self.nbytes)
            self._unseen = True
            self._changed.notify_all()
            return oldest

    def change(self, queries: Iterable[str], emptied: Container[str] = ()) -> None:
        """Go on with these queries; what waits for others, and for those to be `emptied`, is dropped.

        Frames for a query that has gone raise KeyError.
        """
        with self._changed:
            before = self._waiting
            self._waiting = {}
            for query in queries:
                self._waiting[query] = deque() if query in emptied else before.pop(query, None) or deque()
                self._depth.setdefault(query, DEPTH)
            for query, waiting in before.items():
                for frame in waiting:
                    self._gone(frame)
                    self._ledger.dropped(query, RELOADED)

    def take(self, query: str, count: int = 1) -> list[Frame]:
        """Up to `count` frames of a query, oldest first; they stay pending in the ledger until they are settled."""
        with self._changed:
            waiting = self._waiting[query]
            return [self._gone(waiting.popleft()) for _ in range(min(count, len(waiting)))]

    def drop(self, query: str, captured_at: float, reason: str) -> Frame | None:
        """Drop the waiting frame captured then; None if it waits no more."""
        with self._changed:
            waiting = self._waiting[query]
            for frame in waiting:
                if frame.captured_at == captured_at:
                    waiting.remove(frame)
                    self._ledger.dropped(query, reason)
                    return self._gone(frame)
            return None

    def pending(self) -> dict[str, tuple[float, ...]]:
        """captured_at of each query's waiting frames, oldest first; queries without one are absent."""
        with self._changed:
            return {
                query: tuple(frame.captured_at for frame in waiting)
                for query, waiting in self._waiting.items()
                if waiting
            }

    def snapshot(self, clock: Callable[[], float]) -> tuple[float, dict[str, tuple[float, ...]]]:
        """The time and what waits then: no frame that comes later is in it, none that came before is missing."""
        with self._changed:
            self._unseen = False
            return clock(), self.pending()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is a frame that no snapshot has seen, `nudge` is called, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or self._unseen, timeout_s)
            self._nudged = False

    def nudge(self) -> None:
        """Wake a `wait`: something other than a frame has changed."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def _came(self, frame: Frame) -> Frame:
        if frame.image is not None:
            number = id(frame.image)
            self._pictures[number] = self._pictures.get(number, 0) + 1
            self.nbytes += frame.image.nbytes if self._pictures[number] == 1 else 0
        return frame

    def _gone(self, frame: Frame) -> Frame:
        if frame.image is not None:
            number = id(frame.image)
            self._pictures[number] -= 1
            if not self._pictures[number]:
                del self._pictures[number]
                self.nbytes -= frame.image.nbytes
        return frame

    def _drop_oldest_picture(self) -> None:
        heads = [waiting[0] for waiting in self._waiting.values() if waiting and waiting[0].image is not None]
        image = min(heads, key=lambda frame: frame.captured_at).image
        for query, waiting in self._waiting.items():
            for frame in [frame for frame in waiting if frame.image is image]:
                waiting.remove(frame)
                self._gone(frame)
                self._ledger.dropped(query, MEMORY)


class FrameRouter:
    """Leaves frames in the mailboxes, where `saw` hears of each first. Cameras call `put` from their threads.

    A camera is known by itself, not by its name: what one that was replaced still brings is nobody's.
    """

    def __init__(self, mailboxes: Mailboxes, saw: Callable[[str, Frame], object]) -> None:
        self._mailboxes, self._saw = mailboxes, saw
        self._sources: Mapping[str, object] = {}
        self._next = 0
        self._least: Mapping[str, int] = {}
        self._lock = threading.Lock()

    def put(self, source: object, query: str, frame: Frame) -> None:
        """A frame of this camera; let go where the query takes none of it (any more)."""
        with self._lock:
            if self._sources.get(query) is source and frame.index >= self._least.get(query, 0):
                self._next = max(self._next, frame.index + 1)
                self._saw(query, frame)
                self._mailboxes.put(query, frame)

    def change(self, sources: Mapping[str, object], meanwhile: Callable[[], object] = lambda: None) -> int:
        """From now on each query takes the frames of this camera; nothing arrives while `meanwhile` is called.

        Returns the first number that no frame has had so far. Whoever takes another camera's than before takes none
        with a lower one: a query's frame numbers never come twice.
        """
        with self._lock:
            moved = {query for query, source in sources.items() if self._sources.get(query) is not source}
            self._least = {query: self._next if query in moved else self._least.get(query, 0) for query in sources}
            self._sources = dict(sources)
            meanwhile()
            return self._next


# A frame is compared with the one before by a grid of about so many pixels each way.
GRID = 24
NEWEST_SHARE = 0.05
# No scene counts more or less than so many times the average, however still or busy it is.
MAX_URGENCY_RATIO = 4.0


class SceneChange:
    """A running average, per query, of how much its frames differ from one to the next, per second.

    `priorities` multiply what is measured. Cameras call `saw` from their threads; it takes some tens of
    microseconds.
    """

    def __init__(self, priorities: Mapping[str, float]) -> None:
        self._priorities = dict(priorities)
        self._last: dict[str, tuple[float, np.ndarray]] = {}
        self._change: dict[str, float] = {}
        self._lock = threading.Lock()

    def change(self, priorities: Mapping[str, float]) -> None:
        """Go on with these queries; what is known of those that stay is kept."""
        with self._lock:
            self._priorities = dict(priorities)
            self._last = {query: last for query, last in self._last.items() if query in priorities}
            self._change = {query: change for query, change in self._change.items() if query in priorities}

    def saw(self, query: str, captured_at: float, image: np.ndarray) -> None:
        """Take note of a frame, RGB uint8 (H, W, 3)."""
        height, width = image.shape[:2]
        grid = image[:: max(1, height // GRID), :: max(1, width // GRID)].astype(np.int16)
        before = self._last.get(query)
        self._last[query] = (captured_at, grid)
        if before is None or before[1].shape != grid.shape or captured_at <= before[0]:
            return
        change = float(np.abs(grid - before[1]).mean()) / 255 / (captured_at - before[0])
        with self._lock:
            known = self._change.get(query, change)
            self._change[query] = known + NEWEST_SHARE * (change - known)

    def urgency(self) -> dict[str, float]:
        """What a stale result of each query costs: its priority times its scene's change over the average one."""
        with self._lock:
            changes, priorities = dict(self._change), self._priorities
        average = sum(changes.values()) / len(changes) if changes else 0.0
        return {query: priority * self._share(changes.get(query), average) for query, priority in priorities.items()}

    @staticmethod
    def _share(change: float | None, average: float) -> float:
        return (
            1.0
            if change is None or average <= 0
            else min(MAX_URGENCY_RATIO, max(1 / MAX_URGENCY_RATIO, change / average))
        )
