"""Frames between cameras and queries: the ledger that counts them, the mailboxes where they wait, and the router."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

REPLACED, DEADLINE, MEMORY, PAUSED, RELOADED = "replaced", "deadline", "memory", "paused", "reload"
STILL, OVERLOAD = "still", "overload"
"""Reasons for which frames are dropped; a still frame needs no run."""
FAILED = "failed"
"""The outcome of a frame whose run failed."""
DEPTH = 8
"""Most frames of one query that wait: as many as the largest batch takes."""
MAX_WAITING_BYTES = 256 * 2**20
"""Most bytes of all waiting pictures, beside the budget."""
GRID = 24
"""Scene change compares frames on a grid of about so many pixels each way."""
NEWEST_SHARE = 0.05
"""Weight of the newest frame in the running average of scene change."""
MAX_URGENCY_RATIO = 4.0
"""Bound of a scene's change relative to the average."""


@dataclass(slots=True)
class FrameCounts:
    """One query's frames. `pending` is counted on its own, so that the sum can be checked."""

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
            "received": self.received, "processed": self.processed, "late": self.late, "failed": self.failed,
            "pending": self.pending, "dropped": dict(sorted(self.dropped.items())),
        }  # fmt: skip


class Ledger:
    """Counts the frames of all queries; thread-safe.

    Every frame is received once and settled at most once: processed, dropped for a reason, or failed. Settling a
    frame that is not pending raises RuntimeError.
    """

    def __init__(self, queries: Iterable[str]) -> None:
        self._counts = {query: FrameCounts() for query in queries}
        self._lock = threading.Lock()

    def add(self, queries: Iterable[str]) -> None:
        """Count these queries too; a query that returns continues its counts."""
        with self._lock:
            self._counts.update({query: FrameCounts() for query in queries if query not in self._counts})

    def count_received(self, query: str) -> None:
        """Count a frame that a camera delivered, pending from now on."""
        with self._lock:
            counts = self._counts[query]
            counts.received += 1
            counts.pending += 1

    def count_processed(self, query: str, late: bool = False) -> None:
        """Count a pending frame as answered."""
        with self._lock:
            counts = self._settle(query)
            counts.processed += 1
            counts.late += late

    def count_dropped(self, query: str, reason: str) -> None:
        """Count a pending frame as dropped for a reason."""
        with self._lock:
            self._settle(query).dropped[reason] += 1

    def count_failed(self, query: str) -> None:
        """Count a pending frame whose run failed."""
        with self._lock:
            self._settle(query).failed += 1

    def _settle(self, query: str) -> FrameCounts:
        counts = self._counts[query]
        if counts.pending < 1:
            raise RuntimeError(f"query {query}: a frame was settled that was not pending")
        counts.pending -= 1
        return counts

    @property
    def balanced(self) -> bool:
        """Whether every query's counts add up."""
        with self._lock:
            return all(counts.balanced for counts in self._counts.values())

    def to_json(self) -> list[dict[str, Any]]:
        """One record per query: `query`, received, processed (of which late), failed, pending, dropped by reason."""
        with self._lock:
            return [{"query": query, **counts.to_json()} for query, counts in self._counts.items()]


class FrameReply(Protocol):
    """Takes the outcome of a pushed frame, once for each query; called from any thread, returns at once."""

    def answer(self, query: str, record: Mapping[str, Any]) -> None:
        """The frame was processed, with this result record."""
        ...

    def decline(self, query: str, reason: str) -> None:
        """The frame was dropped for this reason, or failed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame on its way to a query.

    `index` counts the camera's frames from 0, skipped ones included. `captured_at` is in seconds of the schedule's
    clock, `captured_unix` the same moment in Unix seconds. `image` is RGB uint8 (H, W, 3), None on the virtual clock.
    `reply` takes the outcome of a frame whose sender waits for it.
    """

    index: int
    captured_at: float
    captured_unix: float = 0.0
    image: np.ndarray | None = None
    reply: FrameReply | None = None


class Mailboxes:
    """One short queue per query, counted in the ledger under the same lock; thread-safe.

    At most `depth` frames of a query wait, and at most `max_waiting_bytes` of pictures; a picture that several queries
    wait with counts once. Whether a waiting frame can still be in time is decided by the schedule, which drops it then.
    `on_frame` is called for every frame, in the order in which a snapshot sees them.
    """

    def __init__(
        self,
        queries: Iterable[str],
        ledger: Ledger,
        depth: int = DEPTH,
        on_frame: Callable[[str, Frame], object] = lambda query, frame: None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._waiting: dict[str, deque[Frame]] = {query: deque() for query in queries}
        self._ledger, self._depth, self._on_frame = ledger, depth, on_frame
        self._changed = threading.Condition()
        self._is_woken = self._has_new = False
        self.max_waiting_bytes = max_waiting_bytes
        self.nbytes = self.max_bytes = 0
        self._uses: Counter[int] = Counter()
        """By picture (its id), the number of queries that wait with it."""

    def put(self, query: str, frame: Frame) -> None:
        """Leave a frame, which replaces the oldest waiting one of the query where too many wait.

        Where the pictures exceed their bytes, the oldest is dropped for every query that waits with it.
        """
        with self._changed:
            waiting = self._waiting[query]
            if len(waiting) >= self._depth:
                self._drop(query, waiting[0], REPLACED)
            waiting.append(frame)
            if frame.image is not None:
                self._uses[id(frame.image)] += 1
                self.nbytes += frame.image.nbytes if self._uses[id(frame.image)] == 1 else 0
            self._ledger.count_received(query)
            self._on_frame(query, frame)
            while self.nbytes > self.max_waiting_bytes and len(self._uses) > 1:
                self._drop_oldest_picture()
            self.max_bytes = max(self.max_bytes, self.nbytes)
            self._has_new = True
            self._changed.notify_all()

    def skip(self, query: str, reason: str) -> None:
        """Count a frame that is not to be run."""
        with self._changed:
            self._ledger.count_received(query)
            self._ledger.count_dropped(query, reason)

    def change(self, queries: Iterable[str], emptied: Container[str] = ()) -> None:
        """Serve these queries; frames waiting for others, and for those to be `emptied`, are dropped.

        Later frames for a removed query raise KeyError.
        """
        with self._changed:
            kept = dict.fromkeys(queries)
            for query, waiting in self._waiting.items():
                if query in emptied or query not in kept:
                    for frame in list(waiting):
                        self._drop(query, frame, RELOADED)
            self._waiting = {query: self._waiting.get(query) or deque() for query in kept}

    def take(self, query: str, count: int = 1) -> list[Frame]:
        """Up to `count` frames of a query, oldest first; they stay pending in the ledger until they are settled."""
        with self._changed:
            frames = list(self._waiting[query])[:count]
            for frame in frames:
                self._remove(query, frame)
            return frames

    def drop(self, query: str, captured_at: float, reason: str) -> None:
        """Drop the frame captured then, if it still waits."""
        with self._changed:
            for frame in self._waiting[query]:
                if frame.captured_at == captured_at:
                    self._drop(query, frame, reason)
                    return

    def pending(self) -> dict[str, tuple[float, ...]]:
        """captured_at of each query's waiting frames, oldest first; queries without one are absent."""
        with self._changed:
            return {
                query: tuple(frame.captured_at for frame in waiting)
                for query, waiting in self._waiting.items()
                if waiting
            }

    def snapshot(self, clock: Callable[[], float]) -> tuple[float, dict[str, tuple[float, ...]]]:
        """The time and the frames that wait then, consistent with each other."""
        with self._changed:
            self._has_new = False
            return clock(), self.pending()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is a frame that no snapshot has seen, `wake` is called, or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_woken or self._has_new, timeout_s)
            self._is_woken = False

    def wake(self) -> None:
        """End a `wait`: something other than a frame has changed."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _remove(self, query: str, frame: Frame) -> None:
        self._waiting[query].remove(frame)
        if frame.image is not None:
            self._uses[id(frame.image)] -= 1
            if not self._uses[id(frame.image)]:
                del self._uses[id(frame.image)]
                self.nbytes -= frame.image.nbytes

    def _drop(self, query: str, frame: Frame, reason: str) -> None:
        self._remove(query, frame)
        self._ledger.count_dropped(query, reason)
        if frame.reply is not None:
            frame.reply.decline(query, reason)

    def _drop_oldest_picture(self) -> None:
        heads = [waiting[0] for waiting in self._waiting.values() if waiting and waiting[0].image is not None]
        image = min(heads, key=lambda frame: frame.captured_at).image
        for query, waiting in self._waiting.items():
            for frame in [frame for frame in waiting if frame.image is image]:
                self._drop(query, frame, MEMORY)


class FrameRouter:
    """Routes frames from cameras to mailboxes; each query takes those of one camera. Cameras call `put`.

    Sources are compared by identity, so that frames of a replaced camera are dropped. `on_frame` is called first.
    """

    def __init__(self, mailboxes: Mailboxes, on_frame: Callable[[str, Frame], object]) -> None:
        self._mailboxes, self._on_frame = mailboxes, on_frame
        self._sources: Mapping[str, object] = {}
        self._next = 0
        self._first: Mapping[str, int] = {}
        self._lock = threading.Lock()

    def put(self, source: object, query: str, frame: Frame, refusal: str | None = None) -> str | None:
        """A frame of this camera; why it is not run: RELOADED where the query takes none of it (any more).

        A frame with a `refusal` is not run: it counts as dropped where that is STILL, else not at all.
        """
        with self._lock:
            is_taken = self._sources.get(query) is source and frame.index >= self._first.get(query, 0)
            if is_taken:
                self._next = max(self._next, frame.index + 1)
                self._on_frame(query, frame)
                if refusal is None:
                    self._mailboxes.put(query, frame)
                elif refusal == STILL:
                    self._mailboxes.skip(query, refusal)
            return refusal if is_taken else RELOADED

    def skip(self, source: object, query: str, reason: str) -> None:
        """Count a frame of this camera that is dropped before it is decoded."""
        with self._lock:
            if self._sources.get(query) is source:
                self._mailboxes.skip(query, reason)

    def change(self, sources: Mapping[str, object], meanwhile: Callable[[], object] = lambda: None) -> int:
        """Route by these sources from now on; no frame arrives while `meanwhile` is called.

        Returns the first unused frame number. A query with a new source takes no lower one, so that its frame numbers
        never repeat.
        """
        with self._lock:
            moved = {query for query, source in sources.items() if self._sources.get(query) is not source}
            self._first = {query: self._next if query in moved else self._first.get(query, 0) for query in sources}
            self._sources = dict(sources)
            meanwhile()
            return self._next


class SceneChange:
    """A running average, per query, of how much its frames differ from one to the next, per second.

    `priorities` multiply the measured change. Cameras call `add`, which takes tens of microseconds.
    """

    def __init__(self, priorities: Mapping[str, float]) -> None:
        self._priorities = dict(priorities)
        self._last: dict[str, tuple[float, np.ndarray]] = {}
        self._change: dict[str, float] = {}
        self._lock = threading.Lock()

    def change(self, priorities: Mapping[str, float]) -> None:
        """Serve these queries; the averages of those that stay are kept."""
        with self._lock:
            self._priorities = dict(priorities)
            self._last = {query: last for query, last in self._last.items() if query in priorities}
            self._change = {query: change for query, change in self._change.items() if query in priorities}

    def add(self, query: str, captured_at: float, image: np.ndarray) -> None:
        """Measure a frame, RGB uint8 (H, W, 3)."""
        height, width = image.shape[:2]
        grid = image[:: max(1, height // GRID), :: max(1, width // GRID)].astype(np.int16)
        before = self._last.get(query)
        self._last[query] = (captured_at, grid)
        if before is None or before[1].shape != grid.shape or captured_at <= before[0]:
            return
        change = float(np.abs(grid - before[1]).mean()) / 255 / (captured_at - before[0])
        with self._lock:
            average = self._change.get(query, change)
            self._change[query] = average + NEWEST_SHARE * (change - average)

    def urgency(self) -> dict[str, float]:
        """The cost of a stale result of each query: its priority times its scene's change over the average one."""
        with self._lock:
            changes, priorities = dict(self._change), self._priorities
        average = sum(changes.values()) / len(changes) if changes else 0.0
        if average <= 0:
            return dict(priorities)
        ratios = {query: changes.get(query, average) / average for query in priorities}
        least, most = 1 / MAX_URGENCY_RATIO, MAX_URGENCY_RATIO
        return {query: priority * min(most, max(least, ratios[query])) for query, priority in priorities.items()}
