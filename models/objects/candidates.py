"""A detector's candidates in NumPy: the best of its boxes, and of those that overlap the best one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAX_CANDIDATES = 300
"""Of one frame that suppression compares, where a family has no other number."""
MAX_DETECTIONS = 100
MIN_SPREAD = 1e-12
"""Added to the variance of a rotated box, in fractions of the input: one without an area has an inverse, too."""
COMPARED_AT_ONCE = 128
"""Candidates that are compared with each other in one step of suppression."""


class Candidates(NamedTuple):
    """The candidates of one frame: boxes f32 (K, 4) in fractions of the input, scores (K,), labels (K,) from 0.

    `points` f32 (K, P, 3), for the task keypoints, are x and y in fractions of the input, and their scores. `corners`
    f32 (K, 4, 2) are those of rotated boxes, in fractions. `coefficients` (K, M) make a mask's logits of the frame's
    `prototypes` (M, h, w), which cover the input.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    points: np.ndarray | None = None
    corners: np.ndarray | None = None
    coefficients: np.ndarray | None = None
    prototypes: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Candidates:
        """These candidates alone, in this order."""
        parts = (None if part is None else part[rows] for part in self[:-1])
        return Candidates(*parts, self.prototypes)  # type: ignore[arg-type]


class BoxReader(ABC):
    """Reads a detector's outputs.

    `nms_iou` is the overlap from which the weaker of two candidates of one class is suppressed; None where the network
    has done so itself.
    """

    nms_iou: float | None

    @abstractmethod
    def candidates(self, outputs: Sequence[np.ndarray], min_score: float) -> list[Candidates]:
        """The candidates of each frame with a score of `min_score` or more, before suppression."""


@dataclass(frozen=True)
class DecodedReader(BoxReader):
    """Reads boxes f32 (N, A, 4) in fractions of the input, scores (N, A, C), and points (N, A, P, 3) if there are any.

    `most_candidates` bounds the candidates of one frame.
    """

    nms_iou: float | None
    most_candidates: int = MAX_CANDIDATES

    def candidates(self, outputs: Sequence[np.ndarray], min_score: float) -> list[Candidates]:
        """The best ones."""
        return [
            choose_best(*frame, min_score=min_score, max_candidates=self.most_candidates)
            for frame in zip(*outputs)
        ]


@dataclass(frozen=True)
class SuppressedReader(BoxReader):
    """Reads boxes (N, D, 4), scores (N, D), labels (N, D) and points (N, D, P, 3) if there are any.

    Rows with a score of 0 hold nothing.
    """

    nms_iou: float | None = None

    def candidates(self, outputs: Sequence[np.ndarray], min_score: float) -> list[Candidates]:
        """The rows that hold something."""
        frames = [Candidates(*frame) for frame in zip(*outputs)]
        return [
            frame.take(np.flatnonzero((frame.scores >= min_score) & (frame.scores > 0)))
            for frame in frames
        ]


def choose_best(
    boxes: np.ndarray,
    scores: np.ndarray,
    points: np.ndarray | None = None,
    *,
    min_score: float,
    max_candidates: int,
    **shapes: np.ndarray,
) -> Candidates:
    """The best candidates of one frame from `min_score` on: boxes (A, 4), scores (A, C), points (A, P, 3).

    `shapes` are `corners`, or `coefficients`, of the same rows.
    """
    flat = scores.ravel()
    places = np.flatnonzero(flat >= min_score)
    if len(places) > max_candidates:
        values = flat[places]
        # To sort all of them would take much longer.
        least = np.partition(values, -max_candidates)[-max_candidates]
        places = places[values >= least]
        places = places[np.argsort(-flat[places], kind="stable")[:max_candidates]]
    rows, labels = np.divmod(places, scores.shape[1])
    shapes_of_rows = {name: values[rows] for name, values in shapes.items()}
    best = Candidates(
        boxes[rows].clip(0, 1), flat[places], labels, None if points is None else points[rows]
    )
    return best._replace(**shapes_of_rows)


def suppress(candidates: Candidates, nms_iou: float | None) -> Candidates:
    """The best candidates, best first, without what overlaps a better one of its class by more than `nms_iou`.

    Of equal scores the first one wins. The result is that of torchvision's batched_nms; of rotated boxes the overlap is
    that of normal distributions.
    """
    ordered = candidates.take(np.argsort(-candidates.scores, kind="stable"))
    if nms_iou is None:
        return ordered.take(np.arange(min(len(ordered.scores), MAX_DETECTIONS)))
    chosen = np.empty(0, np.int64)
    for start in range(0, len(ordered.scores), COMPARED_AT_ONCE):
        block = np.arange(start, min(start + COMPARED_AT_ONCE, len(ordered.scores)))
        if len(chosen):
            block = block[~_rivals(ordered, block, chosen, nms_iou).any(axis=1)]
        winners = _winners(_rivals(ordered, block, block, nms_iou))
        chosen = np.concatenate([chosen, block[winners]])[:MAX_DETECTIONS]
        if len(chosen) == MAX_DETECTIONS:
            break
    return ordered.take(chosen)


def _rivals(
    candidates: Candidates, rows: np.ndarray, columns: np.ndarray, nms_iou: float
) -> np.ndarray:
    """bool (R, O): which of these rows and of the others are of one class and overlap by more than `nms_iou`."""
    same = candidates.labels[rows][:, None] == candidates.labels[columns]
    if candidates.corners is not None:
        return same & (
            _overlap_rotated(candidates.corners[rows], candidates.corners[columns]) > nms_iou
        )
    x0, y0, x1, y1 = candidates.boxes[rows].T[:, :, None]
    left, top, right, bottom = candidates.boxes[columns].T
    width = np.minimum(x1, right) - np.maximum(x0, left)
    height = np.minimum(y1, bottom) - np.maximum(y0, top)
    shared = width.clip(0, None) * height.clip(0, None)
    whole = (x1 - x0) * (y1 - y0) + (right - left) * (bottom - top) - shared
    with np.errstate(invalid="ignore", divide="ignore"):  # boxes without an area overlap nothing
        overlap = shared / whole
    return (overlap > np.float64(nms_iou)) & same


def _overlap_rotated(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(R, O): ProbIoU of rotated boxes by their corners (R, 4, 2) and (O, 4, 2), as Ultralytics suppresses by.

    A box is the normal distribution of its centre and second moments; 1 - the Hellinger distance of two. Llerena et
    al., "Gaussian Bounding Boxes and Probabilistic Intersection-over-Union", 2021.
    """
    (centre, spread), (other, other_spread) = (_moments(boxes) for boxes in (first, second))
    offsets = centre[:, None] - other
    both = (spread[:, None] + other_spread) / 2
    far = np.einsum("roi,roij,roj->ro", offsets, np.linalg.inv(both), offsets) / 8
    areas = np.sqrt(np.linalg.det(spread)[:, None] * np.linalg.det(other_spread))
    return 1 - np.sqrt(1 - np.exp(-far - np.log(np.linalg.det(both) / areas) / 2).clip(0, 1))


def _moments(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres (K, 2) and covariances (K, 2, 2) of rotated boxes."""
    sides = np.diff(corners[:, :3].astype(np.float64), axis=1)
    spread = np.einsum("ksi,ksj->kij", sides, sides) / 12
    return corners.mean(axis=1, dtype=np.float64), spread + MIN_SPREAD * np.eye(2)


def _winners(rivals: np.ndarray) -> np.ndarray:
    """The rows, best first, that are no rivals (K, K) of a better winner."""
    worse = np.triu(rivals, 1)
    is_winner = np.ones(len(rivals), bool)
    for row in np.flatnonzero(worse.any(axis=1)):
        if is_winner[row]:
            is_winner &= ~worse[row]
    return np.flatnonzero(is_winner)
