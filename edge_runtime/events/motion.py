"""Motion gating: whether anything moves in a frame, against the frame that was answered last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemel.edge_runtime.events.zones import Polygon, is_inside
from gemel.models.preprocess import WHOLE_FRAME, Region


@dataclass(frozen=True, slots=True)
class MotionConfig:
    """The tunables of motion gating, chosen on real footage by day and night."""

    columns: int = 64
    """Cells across the picture: a car of 30 pixels in a frame of 352 covers several."""
    samples: int = 6
    """Pixels across a cell that are averaged, against the noise of a sensor at night."""
    threshold: float = 10.0
    """Least difference of a cell's mean, of 255, that is motion."""
    min_cells: int = 1
    """Least cells that move."""
    max_still_s: float = 10.0
    """A query runs at least this often, so that an answer is never older."""


DEFAULT_MOTION = MotionConfig()
MAX_IN_FLIGHT = 32
"""Frames of a query whose answer is awaited; more than its mailbox holds."""


class MotionGate:
    """One query's gate: frames pass unless they equal the frame that was answered last, cell by cell.

    A change of the whole picture's brightness is no motion. `ignored` are zones whose cells are not looked at.
    `is_still` is called by the camera's thread, `confirm` by the thread that runs queries.
    """

    def __init__(
        self, region: Region = WHOLE_FRAME, ignored: Sequence[Polygon] = (), config: MotionConfig = DEFAULT_MOTION
    ) -> None:
        self._region, self._ignored, self._config = region, tuple(ignored), config
        self._waiting: OrderedDict[int, tuple[float, np.ndarray]] = OrderedDict()
        self._answered: tuple[float, np.ndarray] | None = None
        self._seen: np.ndarray | None = None

    def is_still(self, index: int, captured_at: float, image: np.ndarray) -> bool:
        """Whether nothing moves in a frame, RGB uint8 (H, W, 3); one that moves waits for its answer."""
        grid = self._cells(image)
        answered = self._answered
        is_recent = answered is not None and 0 <= captured_at - answered[0] < self._config.max_still_s
        if answered is not None and is_recent and not self._moves(answered[1], grid, image.shape[1::-1]):
            return True
        self._waiting[index] = captured_at, grid
        while len(self._waiting) > MAX_IN_FLIGHT:
            self._waiting.popitem(last=False)
        return False

    def confirm(self, index: int) -> None:
        """This frame was answered: later frames are compared with it."""
        found = self._waiting.pop(index, None)
        if found is not None:
            self._answered = found

    def _cells(self, image: np.ndarray) -> np.ndarray:
        """The green mean of each cell, float32 (rows, columns)."""
        import cv2

        part = self._region.crop(image)
        height, width = part.shape[:2]
        step = max(1, width // (self._config.columns * self._config.samples))
        green = np.ascontiguousarray(part[::step, ::step, 1])
        columns = min(self._config.columns, green.shape[1])
        rows = max(1, min(green.shape[0], round(columns * height / width)))
        return cv2.resize(green.astype(np.float32), (columns, rows), interpolation=cv2.INTER_AREA)

    def _moves(self, before: np.ndarray, after: np.ndarray, size: tuple[int, int]) -> bool:
        if before.shape != after.shape:
            return True
        change = after - before
        change -= np.median(change)
        moving = np.abs(change) > self._config.threshold
        if self._ignored:
            moving &= self._looked_at(moving.shape, size)
        return int(np.count_nonzero(moving)) >= self._config.min_cells

    def _looked_at(self, shape: tuple[int, ...], size: tuple[int, int]) -> np.ndarray:
        """bool (rows, columns): the cells whose middle is in no ignored zone."""
        if self._seen is None or self._seen.shape != shape:
            (rows, columns), (width, height) = shape, size
            x0, y0, x1, y1 = self._region.pixels(size) if self._region.roi else (0, 0, width, height)
            self._seen = np.ones((rows, columns), bool)
            for row in range(rows):
                for column in range(columns):
                    x = (x0 + (column + 0.5) / columns * (x1 - x0)) / width
                    y = (y0 + (row + 0.5) / rows * (y1 - y0)) / height
                    self._seen[row, column] = not any(is_inside(zone, x, y) for zone in self._ignored)
        return self._seen
