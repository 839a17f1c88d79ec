"""F1 of detections at IoU 0.5, micro over classes, and the score threshold that makes it largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.tasks.base import Boxes, DetectionAnswer

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
    """Match detections with objects: best score first, each object once, same class, IoU 0.5 or more.

    None is a frame without an answer. Greedy matching by score makes the matches at a higher threshold a part of
    those at a lower one, so one pass serves every threshold.
    """
    scores, hits, frames = [np.empty(0)], [np.empty(0, bool)], [np.empty(0, np.int64)]
    for index, (answer, truth) in enumerate(zip(answers, truths, strict=True)):
        if answer is None or not answer.scores:
            continue
        order = np.argsort(-np.asarray(answer.scores), kind="stable")
        scores.append(np.asarray(answer.scores, dtype=float)[order])
        hits.append(_match(answer, truth, order))
        frames.append(np.full(len(order), index))
    objects = np.array([len(truth.boxes) for truth in truths], dtype=np.int64)
    return Matches(np.concatenate(scores), np.concatenate(hits), np.concatenate(frames), objects)


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


def _match(answer: DetectionAnswer, truth: Boxes, order: np.ndarray) -> np.ndarray:
    hits = np.zeros(len(order), bool)
    if not truth.boxes:
        return hits
    iou = box_iou(np.asarray(answer.boxes, float)[order], np.asarray(truth.boxes, float))
    same = np.asarray(answer.classes)[order][:, None] == np.asarray(truth.classes)[None, :]
    iou = np.where(same & (iou >= MATCH_IOU), iou, 0.0)
    for row in np.flatnonzero(iou.any(axis=1)):
        column = int(iou[row].argmax())
        if iou[row, column] > 0:
            hits[row] = True
            iou[:, column] = 0.0
    return hits


def box_iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of boxes (N, 4) with boxes (M, 4), x0 y0 x1 y1, as (N, M)."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
