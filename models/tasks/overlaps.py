"""Which detections lie on which objects: found once for all frames, for every metric that asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.tasks.base import Boxes, DetectionAnswer

MIN_IOU = 0.1
"""A detection that overlaps no object by more lies on the background (TIDE)."""
PAIRS_AT_ONCE = 1_000_000
EXACT = 1 - 1e-10
"""What an IoU threshold of 1 stands for, since a quotient of equal areas may round below 1 (pycocotools)."""
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Overlaps:
    """The detections and objects of a list of frames, and the pairs of them that overlap.

    Detections stand frame by frame, best score first, equal scores as they were answered: `frames`, `classes`,
    `scores`, one value each; objects as they were given: `object_frames`, `object_classes`. Classes are positions in
    `names`. A pair is a detection and an object of one frame, of whatever class, with an IoU of MIN_IOU or more:
    `detection`, `object` (positions) and `iou`, in the order of detections, then of objects.
    """

    names: tuple[str, ...]
    frame_count: int
    frames: np.ndarray
    classes: np.ndarray
    scores: np.ndarray
    object_frames: np.ndarray
    object_classes: np.ndarray
    detection: np.ndarray
    object: np.ndarray
    iou: np.ndarray

    def objects_per_frame(self) -> np.ndarray:
        """int64 (frames,)."""
        return np.bincount(self.object_frames, minlength=self.frame_count)

    def same(self) -> np.ndarray:
        """bool (pairs,): detection and object are of one class."""
        return self.classes[self.detection] == self.object_classes[self.object]

    def matched(self, thresholds: Sequence[float]) -> np.ndarray:
        """The object that each detection found, NOBODY where it found none, int64 (thresholds, detections).

        As pycocotools matches: best score first, each object once, same class, an IoU of the threshold or more; of
        several objects the best overlapping one, of equal ones the last. Whether detections of a lower score are there
        changes nothing, so one matching serves every score threshold.
        """
        limits = np.minimum(np.asarray(thresholds, float), EXACT)
        kept = self.same() & (self.iou >= limits.min(initial=EXACT))
        detection, seen, iou = self.detection[kept], self.object[kept], self.iou[kept]
        found = np.full((len(limits), len(self.scores)), NOBODY, np.int64)
        alone = (np.bincount(detection, minlength=len(self.scores))[detection] == 1) & (
            np.bincount(seen, minlength=len(self.object_frames))[seen] == 1
        )
        found[:, detection[alone]] = np.where(iou[alone] >= limits[:, None], seen[alone], NOBODY)
        rivals = _rivals(detection[~alone], seen[~alone], iou[~alone])
        for row, limit in zip(found, limits.tolist(), strict=True):
            taken: set[int] = set()
            for one, pairs in rivals:
                best, chosen = limit, NOBODY
                for which, overlap in pairs:
                    if overlap >= best and which not in taken:
                        best, chosen = overlap, which
                if chosen != NOBODY:
                    taken.add(chosen)
                    row[one] = chosen
        return found


def overlaps_of(answers: Sequence[DetectionAnswer | None], truths: Sequence[Boxes]) -> Overlaps:
    """Look at these frames; None is a frame without an answer."""
    said = [DetectionAnswer() if answer is None else answer for answer in answers]
    numbers: dict[str, int] = {}
    objects, object_classes, object_frames = _flat(truths, numbers)
    boxes, classes, frames = _flat(said, numbers)
    scores = np.array([score for answer in said for score in answer.scores], float)
    order = np.lexsort((-scores, frames))
    boxes, classes, frames, scores = boxes[order], classes[order], frames[order], scores[order]
    pairs = list(_pairs(boxes, np.bincount(frames, minlength=len(said)), objects, object_frames, len(said)))
    detection, seen, iou = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return Overlaps(
        tuple(numbers), len(said), frames, classes, scores, object_frames, object_classes, detection, seen, iou
    )


def _flat(
    listed: Sequence[Boxes] | Sequence[DetectionAnswer], numbers: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes (N, 4), class numbers (N,) and frames (N,) of all frames; new classes get the next number."""
    boxes = np.array([box for one in listed for box in one.boxes], float).reshape(-1, 4)
    classes = np.array([numbers.setdefault(name, len(numbers)) for one in listed for name in one.classes], np.int64)
    frames = np.repeat(np.arange(len(listed)), [len(one.boxes) for one in listed])
    return boxes, classes, frames


def _pairs(
    boxes: np.ndarray, counts: np.ndarray, objects: np.ndarray, object_frames: np.ndarray, frame_count: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Detection, object and IoU of the pairs that overlap enough, for as many frames at a time as memory bears."""
    yield np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    object_counts = np.bincount(object_frames, minlength=frame_count)
    first, first_object = np.cumsum(counts) - counts, np.cumsum(object_counts) - object_counts
    many = counts * object_counts
    parts = np.flatnonzero(np.diff(np.cumsum(many) // PAIRS_AT_ONCE)) + 1
    for part in np.split(np.arange(frame_count), parts):
        frame = np.repeat(part, many[part])
        place = np.arange(len(frame)) - np.repeat(np.cumsum(many[part]) - many[part], many[part])
        detection = first[frame] + place // np.maximum(object_counts[frame], 1)
        seen = first_object[frame] + place % np.maximum(object_counts[frame], 1)
        iou = _iou(boxes[detection], objects[seen])
        near = iou >= MIN_IOU
        yield detection[near], seen[near], iou[near]


def _iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of boxes (N, 4), x0 y0 x1 y1, with as many others, one by one; 0 where neither has an area."""
    sides = np.minimum(first[:, 2:], second[:, 2:]) - np.maximum(first[:, :2], second[:, :2])
    shared = np.clip(sides, 0, None).prod(axis=1)
    union = sum((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)) - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _rivals(detection: np.ndarray, seen: np.ndarray, iou: np.ndarray) -> list[tuple[int, list[tuple[int, float]]]]:
    """The objects of each detection that has several, or rivals for one, in order."""
    found: dict[int, list[tuple[int, float]]] = {}
    for one, which, overlap in zip(detection.tolist(), seen.tolist(), iou.tolist(), strict=True):
        found.setdefault(one, []).append((which, overlap))
    return list(found.items())
