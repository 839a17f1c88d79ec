"""COCO's mean average precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.tasks.base import Boxes, DetectionAnswer
from models.tasks.overlaps import NOBODY, Overlaps, overlaps_of

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MAX_OF_A_CLASS = 100
"""Detections of one class that count in one frame, the best ones."""


def mean_average_precision(
    answers: Sequence[DetectionAnswer | None], truths: Sequence[Boxes], classes: Sequence[str]
) -> dict[str, float]:
    """`map` over IoU 0.5 to 0.95 and `map50` at 0.5, 0..1; NaN where there are no objects at all.

    Sources: cocodataset.org/#detection-eval, all areas; the tests hold it against pycocotools. None is a frame without
    an answer; a class without objects counts for nothing.
    """
    return average_precision(overlaps_of(answers, truths), classes)


def average_precision(overlaps: Overlaps, classes: Sequence[str]) -> dict[str, float]:
    """The same of overlaps that were found already."""
    matched = overlaps.matched(IOU_THRESHOLDS.tolist())
    counts = _rank(overlaps) < MAX_OF_A_CLASS
    curves = []
    for number, name in enumerate(overlaps.names):
        objects = int(np.count_nonzero(overlaps.object_classes == number))
        if name in classes and objects:
            own = np.flatnonzero((overlaps.classes == number) & counts)
            own = own[np.argsort(-overlaps.scores[own], kind="stable")]
            curves.append(_precisions(matched[:, own] != NOBODY, objects))
    if not curves:
        return {"map": float("nan"), "map50": float("nan")}
    by_threshold = np.mean(curves, axis=(0, 2))
    return {"map": float(by_threshold.mean()), "map50": float(by_threshold[0])}


def _rank(overlaps: Overlaps) -> np.ndarray:
    """How many better detections of its class each one's frame has."""
    key = overlaps.frames * max(len(overlaps.names), 1) + overlaps.classes
    order = np.argsort(key, kind="stable")
    _, starts, sizes = np.unique(key[order], return_index=True, return_counts=True)
    rank = np.empty(len(key), np.int64)
    rank[order] = np.arange(len(key)) - np.repeat(starts, sizes)
    return rank


def _precisions(hits: np.ndarray, objects: int) -> np.ndarray:
    """The best precision at each recall of RECALLS or above, (thresholds, 101), from hits, best score first."""
    right = np.cumsum(hits, axis=1, dtype=float)
    recall = right / objects
    precision = right / np.maximum(np.arange(1, hits.shape[1] + 1), 1)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    curves = np.zeros((len(hits), len(RECALLS)))
    for curve, reached, best in zip(curves, recall, precision, strict=True):
        at = np.searchsorted(reached, RECALLS, side="left")
        curve[at < len(best)] = best[at[at < len(best)]]
    return curves
