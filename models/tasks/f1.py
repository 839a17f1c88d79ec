"""F1 of detections at IoU 0.5, micro over classes, and the score threshold that makes it largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.tasks.base import Boxes, DetectionAnswer
from models.tasks.overlaps import NOBODY, Overlaps, overlaps_of

MATCH_IOU = 0.5
NO_THRESHOLD = 0.5
"""The threshold where val holds nothing to choose it by."""


@dataclass(frozen=True)
class Matches:
    """Every detection of a list of frames: its score, whether it found an object, its frame; and objects per frame."""

    scores: np.ndarray
    hits: np.ndarray
    frames: np.ndarray
    objects: np.ndarray

    def counts(self, threshold: float = 0.0) -> np.ndarray:
        """Hits, detections and objects of each frame, int (frames, 3), for detections from `threshold` on."""
        kept = self.scores >= threshold
        size = len(self.objects)
        hits = np.bincount(self.frames[kept], weights=self.hits[kept], minlength=size)
        detections = np.bincount(self.frames[kept], minlength=size)
        return np.stack([hits.astype(np.int64), detections, self.objects], axis=1)


def match_frames(answers: Sequence[DetectionAnswer | None], truths: Sequence[Boxes]) -> Matches:
    """Match detections with objects as `Overlaps.matched` does, at MATCH_IOU; None is a frame without an answer."""
    return matches_of(overlaps_of(answers, truths))


def matches_of(overlaps: Overlaps) -> Matches:
    """The same of overlaps that were found already."""
    hits = overlaps.matched([MATCH_IOU])[0] != NOBODY
    return Matches(overlaps.scores, hits, overlaps.frames, overlaps.objects_per_frame())


def f1_of(counts: np.ndarray) -> float:
    """2 hits / (detections + objects) over the rows of `Matches.counts`; 1 where there is nothing to see or say."""
    hits, detections, objects = np.asarray(counts).reshape(-1, 3).sum(axis=0)
    return float(2 * hits / (detections + objects)) if detections + objects else 1.0


def best_threshold(matches: Matches) -> float:
    """The score threshold with the largest F1, halfway to the next lower score."""
    if not matches.hits.any():
        return NO_THRESHOLD
    order = np.argsort(-matches.scores, kind="stable")
    scores = matches.scores[order]
    hits = np.cumsum(matches.hits[order])
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + matches.objects.sum())
    # A threshold cannot part equal scores: only the last of them counts.
    f1[:-1][scores[:-1] == scores[1:]] = -1
    best = int(f1.argmax())
    below = scores[best + 1] if best + 1 < len(scores) else 0.0
    return float((scores[best] + below) / 2)
