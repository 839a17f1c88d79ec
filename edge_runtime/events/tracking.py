"""Tracking: one box for each object of a frame, and one number for each object over frames.

An object is first sought where it was expected, by overlap; then, as a walker at a few frames a second no longer
overlaps with itself, by distance in sizes of its box; then among weak detections, by overlap alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_TRACKING_FPS = 2.0
"""Below, an object moves so far from frame to frame that its number is a guess: in a square with walkers 3 of 37
numbers give way to a new one close by at 2.5 frames a second, 22 of 61 at 1.7."""

WEAK_COST = 3.0
"""Above all costs by overlap (0 to 1) and by distance (1 to 2)."""


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """The tunables of tracking, chosen on labelled footage of roads and tried on footage of walkers."""

    lost_s: float = 2.0
    """An object unseen for so long is gone; the footage hides cars behind others for up to about a second."""
    lost_frames: int = 3
    """At a low rate an object is gone after it is missing in so many frames."""
    same_object_iou: float = 0.6
    """Of two boxes that overlap more, whatever their classes, the better shows the object; a network names a bus also
    car and truck, on a fifth of the boxes of a road."""
    weak_score: float = 0.1
    """From which a detection that does not count continues a track (ByteTrack, ECCV 2022, section 3: most objects that
    a detector loses are hidden in part, and have a low score)."""
    min_iou: float = 0.2
    """Least overlap with where an object was expected."""
    max_distance: float = 1.2
    """Most distance from there without overlap, in mean sides of both boxes."""
    distance_growth: float = 0.5
    """By so much a second unseen, up to one second, `max_distance` grows."""
    size_cost: float = 0.5
    """How much a change of size counts against distance, by the logarithm of the factor."""
    max_size_change: float = 2.0
    """Most factor between the sides of an object in two frames."""
    position_gain: float = 0.7
    speed_gain: float = 0.3
    """How far place and speed follow a new box: an alpha-beta filter."""
    size_gain: float = 0.5

    def lost_after_s(self, fps: float) -> float:
        """When an object is gone, at this rate."""
        return max(self.lost_s, self.lost_frames / fps)


DEFAULT_TRACKING = TrackingConfig()


def unite_boxes(
    detections: Sequence[Mapping[str, Any]], iou: float, weak: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """One detection for each object: of those that overlap by more than `iou`, whatever their classes, the best; one of
    `detections` is better than any `weak` one."""
    strong, detections = len(detections), [*detections, *weak]
    if len(detections) < 2:
        return detections
    boxes = _boxes(detections)
    overlaps = _overlaps(boxes, boxes)
    order = np.lexsort(([-one["score"] for one in detections], np.arange(len(detections)) >= strong))
    is_shadowed = np.zeros(len(detections), bool)
    for place, best in enumerate(order):
        if not is_shadowed[best]:
            worse = order[place + 1 :]
            is_shadowed[worse[overlaps[best, worse] > iou]] = True
    return [one for one, shadowed in zip(detections, is_shadowed, strict=True) if not shadowed]


@dataclass(slots=True, eq=False)
class TrackState:
    """An object: its `number` from the second frame on, and centre, speed a second and size in pixels, float (2,)."""

    centre: np.ndarray
    speed: np.ndarray
    size: np.ndarray
    seen_at: float
    number: int | None = None


class ObjectTracker:
    """The tracks of one query; numbers begin at 1 and never repeat, also after `reset`.

    `certain_score` is that from which a detection may begin a track.
    """

    def __init__(self, fps: float, certain_score: float = 0.0, config: TrackingConfig = DEFAULT_TRACKING) -> None:
        self._lost_s, self._certain, self._config = config.lost_after_s(fps), certain_score, config
        self._next = 1
        self._objects: list[TrackState] = []

    def update(
        self, detections: Sequence[Mapping[str, Any]], now: float, weak: Sequence[Mapping[str, Any]] = ()
    ) -> list[int | None]:
        """The number of each detection of a frame at `now` (seconds, rising), then of each `weak` one, which begins no
        track; None in the first frame of an object."""
        strong, detections = len(detections), [*detections, *weak]
        self._objects = [one for one in self._objects if now - one.seen_at <= self._lost_s]
        numbers: list[int | None] = [None] * len(detections)
        boxes = _boxes(detections)
        centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, np.maximum(boxes[:, 2:] - boxes[:, :2], 1e-3)
        pairs = self._associate(centres, sizes, now, strong)
        for row, column in pairs:
            numbers[column] = self._move(self._objects[row], centres[column], sizes[column], now)
        matched = {column for _, column in pairs}
        for column, detection in enumerate(detections):
            if column < strong and column not in matched and detection["score"] >= self._certain:
                self._objects.append(TrackState(centres[column], np.zeros(2), sizes[column], now))
        return numbers

    def reset(self) -> None:
        """Forget all tracks."""
        self._objects = []

    def _associate(self, centres: np.ndarray, sizes: np.ndarray, now: float, strong: int) -> list[tuple[int, int]]:
        """(object, detection) of the same object, the surest first: by overlap, then by distance, then by overlap with
        those from the `strong`-th on."""
        if not self._objects or not len(centres):
            return []
        config = self._config
        unseen_s = np.array([[now - one.seen_at] for one in self._objects])
        expected = np.array([one.centre for one in self._objects])
        expected = expected + unseen_s * np.array([one.speed for one in self._objects])
        before = np.array([one.size for one in self._objects])
        overlaps = _overlaps(_corners(expected, before), _corners(centres, sizes))
        shift = 2 * (centres[None] - expected[:, None]) / (sizes[None] + before[:, None])
        growth = np.abs(np.log(sizes[None] / before[:, None]).mean(axis=2))
        distance = np.hypot(shift[..., 0], shift[..., 1]) + config.size_cost * growth
        distance /= config.max_distance * (1 + config.distance_growth * np.minimum(unseen_s, 1.0))
        is_near = (distance <= 1) & (growth <= np.log(config.max_size_change))
        costs = np.where(overlaps >= config.min_iou, 1 - overlaps, np.where(is_near, 1 + distance, np.inf))
        costs[:, strong:] = np.where(overlaps >= config.min_iou, WEAK_COST + costs, np.inf)[:, strong:]
        return _pair_greedily(costs)

    def _move(self, moving: TrackState, centre: np.ndarray, size: np.ndarray, now: float) -> int:
        """Take over where an object was seen; its number."""
        config, unseen_s = self._config, max(now - moving.seen_at, 1e-3)
        is_second = moving.number is None
        expected = moving.centre + unseen_s * moving.speed
        error = centre - expected
        moving.centre = centre if is_second else expected + config.position_gain * error
        moving.speed = moving.speed + (1.0 if is_second else config.speed_gain) * error / unseen_s
        moving.size = moving.size + config.size_gain * (size - moving.size)
        moving.seen_at = now
        if moving.number is None:
            moving.number, self._next = self._next, self._next + 1
        return moving.number


def _pair_greedily(costs: np.ndarray) -> list[tuple[int, int]]:
    """(row, column) of the finite costs, the least first, each row and column once."""
    rows, columns, pairs = set[int](), set[int](), []
    for place in np.argsort(costs, axis=None):
        row, column = divmod(int(place), costs.shape[1])
        if not np.isfinite(costs[row, column]):
            break
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((row, column))
    return pairs


def _boxes(detections: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([one["box"] for one in detections], float).reshape(-1, 4)


def _corners(centres: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1)


def _overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of each pair of boxes, (N, 4) and (M, 4) -> (N, M)."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    return shared / np.maximum(areas[0][:, None] + areas[1][None] - shared, 1e-9)
