"""How fast scenes change, from which follows what a stale result costs."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

# A frame is compared with the one before by a grid of about so many pixels each way.
GRID = 24
NEWEST_SHARE = 0.05
# No scene counts more or less than so many times the average, however still or busy it is.
MOST = 4.0


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
        return 1.0 if change is None or average <= 0 else min(MOST, max(1 / MOST, change / average))
