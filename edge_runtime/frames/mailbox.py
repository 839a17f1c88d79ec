"""Mailboxes: for each query the few frames that wait and can still be in time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_runtime.frames.ledger import MEMORY, RELOADED, REPLACED, Ledger

if TYPE_CHECKING:
    import numpy as np

DEPTH = 8
"""Frames of one query that wait at most: as many as the largest batch takes."""
MAX_BYTES = 256 * 2**20
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
        most_bytes: int = MAX_BYTES,
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
