"""Mailboxes: for each query the newest frame that waits, nothing older."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_runtime.ledger import REPLACED, Ledger

if TYPE_CHECKING:
    import numpy as np


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
    """One mailbox of depth one per query, entered in the ledger under the same lock; safe between threads."""

    def __init__(self, queries: Iterable[str], ledger: Ledger) -> None:
        self._waiting: dict[str, Frame | None] = dict.fromkeys(queries)
        self._ledger = ledger
        self._changed = threading.Condition()
        self._nudged = False

    def put(self, query: str, frame: Frame) -> Frame | None:
        """Leave a frame; returns the older one it replaced, which counts as dropped."""
        with self._changed:
            older, self._waiting[query] = self._waiting[query], frame
            self._ledger.received(query)
            if older is not None:
                self._ledger.dropped(query, REPLACED)
            self._changed.notify_all()
            return older

    def take(self, query: str) -> Frame | None:
        """The query's newest frame, which stays pending in the ledger until it is settled; None if none waits."""
        with self._changed:
            frame, self._waiting[query] = self._waiting[query], None
            return frame

    def drop(self, query: str, captured_at: float, reason: str) -> Frame | None:
        """Drop the frame captured then; None if a newer one has taken its place, which is left alone."""
        with self._changed:
            frame = self._waiting[query]
            if frame is None or frame.captured_at != captured_at:
                return None
            self._waiting[query] = None
            self._ledger.dropped(query, reason)
            return frame

    def pending(self) -> dict[str, float]:
        """captured_at of each query's waiting frame; queries without one are absent."""
        with self._changed:
            return {query: frame.captured_at for query, frame in self._waiting.items() if frame is not None}

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame waits, `nudge` is called, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or any(self._waiting.values()), timeout_s)
            self._nudged = False

    def nudge(self) -> None:
        """Wake a `wait`: something other than a frame has changed."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()
