"""The intake: frames on their way from cameras to mailboxes; each query takes those of one camera."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from edge_runtime.frames.mailbox import Frame, Mailboxes


class Intake:
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
