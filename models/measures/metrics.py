"""Detection metrics: matching at an IoU, F1, mean average precision (COCO), types of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemel.models.errors import InputError
from gemel.models.objects.outlines import outline_area, outline_box, outline_iou
from gemel.models.predictions import (
    BOX_SHARE,
    BoxLabels,
    DetectionPrediction,
    Outline,
    PoseLabels,
    PosePrediction,
)

MIN_IOU = 0.1
"""A detection that overlaps no object by more is on the background (TIDE)."""
PAIRS_AT_ONCE = 1_000_000
EXACT = 1 - 1e-10
"""Used for an IoU threshold of 1, since a quotient of equal areas may round below 1 (pycocotools)."""
UNMATCHED, IN_CROWD = -1, -2
SIGMAS = (
    0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072, 0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089,
    0.089,
)  # fmt: skip
"""The deviations of COCO's points of a person, in square roots of its area."""


@dataclass(frozen=True, eq=False)
class Overlaps:
    """The detections and objects of a list of frames, and the pairs of them that overlap.

    Detections are ordered by frame, then by score, best first (stable): `frames`, `classes`, `scores`, one value each.
    Objects keep their order: `object_frames`, `object_classes`. Classes are positions in `names`. A pair is a detection
    and an object of one frame, of any class, with an IoU of MIN_IOU or more: `detection`, `object` (positions) and
    `iou`, in the order of detections, then of objects. `crowd` is the largest fraction of each detection that lies in
    one crowd region of its class.
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
    crowd: np.ndarray

    def objects_per_frame(self) -> np.ndarray:
        """int64 (frames,)."""
        return np.bincount(self.object_frames, minlength=self.frame_count)

    def same(self) -> np.ndarray:
        """bool (pairs,): detection and object are of one class."""
        return self.classes[self.detection] == self.object_classes[self.object]

    def match(self, thresholds: Sequence[float]) -> np.ndarray:
        """The object that each detection found, int64 (thresholds, detections); UNMATCHED or IN_CROWD without one.

        As pycocotools matches: best score first, each object once, same class, an IoU of the threshold or more; of
        several objects the best overlapping one, of equal ones the last. A detection without an object is IN_CROWD, and
        counts for nothing, where at least the threshold's fraction of its area lies in a crowd region of its class.
        Whether detections of a lower score are there changes nothing, so one matching serves every score threshold.
        """
        limits = np.minimum(np.asarray(thresholds, float), EXACT)
        eligible = self.same() & (self.iou >= limits.min(initial=EXACT))
        detection = self.detection[eligible]
        seen = self.object[eligible]
        iou = self.iou[eligible]
        matched = np.full((len(limits), len(self.scores)), UNMATCHED, np.int64)
        alone = (np.bincount(detection, minlength=len(self.scores))[detection] == 1) & (
            np.bincount(seen, minlength=len(self.object_frames))[seen] == 1
        )
        matched[:, detection[alone]] = np.where(
            iou[alone] >= limits[:, None], seen[alone], UNMATCHED
        )
        rivals = _rivals(detection[~alone], seen[~alone], iou[~alone])
        for row, limit in zip(matched, limits.tolist(), strict=True):
            taken: set[int] = set()
            for detection_index, pairs in rivals:
                best = limit
                chosen = UNMATCHED
                for which, overlap in pairs:
                    if overlap >= best and which not in taken:
                        best = overlap
                        chosen = which
                if chosen != UNMATCHED:
                    taken.add(chosen)
                    row[detection_index] = chosen
        matched[(matched == UNMATCHED) & (self.crowd >= limits[:, None])] = IN_CROWD
        return matched


def overlaps_of(
    predictions: Sequence[DetectionPrediction | None], labels: Sequence[BoxLabels]
) -> Overlaps:
    """The overlaps of these frames; None is a frame without a prediction.

    They are those of outlines where the labels and a prediction have them; an upright box of another is its corners.
    Else they are those of boxes.
    """
    answered = [
        DetectionPrediction() if prediction is None else prediction for prediction in predictions
    ]
    is_outlined = all(len(label.outlines) == len(label.boxes) for label in labels) and any(
        prediction.outlines for prediction in answered
    )
    if not is_outlined:
        return _find_overlaps(answered, labels, _boxes(answered), _boxes(labels), _iou)
    outlines = _outlines(answered)
    object_outlines = [outline for label in labels for outline in label.outlines]
    areas = [
        np.array([outline_area(outline) for outline in side])
        for side in (outlines, object_outlines)
    ]

    def measure(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        shared = _intersection(first[:, :4], second[:, :4])
        rows = np.column_stack([first[:, 4], second[:, 4]]).astype(int)
        larger_areas = np.maximum(areas[0][rows[:, 0]], areas[1][rows[:, 1]])
        overlap = np.zeros(len(first))
        near = np.flatnonzero((shared > 0) & (shared >= MIN_IOU * larger_areas))
        overlap[near] = [
            outline_iou(outlines[detection], object_outlines[seen])
            for detection, seen in rows[near].tolist()
        ]
        return overlap

    detection_rows, theirs = (
        np.column_stack([boxes, np.arange(len(boxes))])
        for boxes in (_boxes(answered), _boxes(labels))
    )
    return _find_overlaps(answered, labels, detection_rows, theirs, measure)


def _outlines(listed: Sequence[DetectionPrediction]) -> list[Outline]:
    """The outlines of all frames; an object without one has its box."""
    return [
        outline
        for frame in listed
        for outline in frame.outlines or [outline_box(box) for box in frame.boxes]
    ]


def pose_overlaps_of(
    predictions: Sequence[PosePrediction | None], labels: Sequence[PoseLabels]
) -> Overlaps:
    """As `overlaps_of`, with the object keypoint similarity instead of the IoU (cocodataset.org/#keypoints-eval).

    Deviations are COCO's for its 17 points, their mean for others. Raises InputError for another number of points.
    """
    answered = [
        PosePrediction() if prediction is None else prediction for prediction in predictions
    ]
    counts = {len(points) for frame in (*answered, *labels) for points in frame.points}
    if len(counts) > 1:
        problem = f"objects have {' and '.join(map(str, sorted(counts)))} points"
        raise InputError(
            "keypoints",
            problem,
            "give `model_args: {num_keypoints: N}`, or other labels",
            "model_args",
        )
    width = max(counts, default=0)
    detections = np.array([points for frame in answered for points in frame.points], float).reshape(
        -1, 3 * width
    )
    objects = np.array([points for frame in labels for points in frame.points], float).reshape(
        -1, 3 * width
    )
    areas = [area for frame in labels for area in frame.areas or _areas_by_box(frame)]
    return _find_overlaps(answered, labels, detections, np.column_stack([objects, areas]), _oks)


def _areas_by_box(label: BoxLabels) -> list[float]:
    return [BOX_SHARE * (x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in label.boxes]


def _oks(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """OKS of points (N, 3 K) with those of as many objects and their areas (N, 3 K + 1), one by one."""
    detected, theirs = (
        rows[:, : first.shape[1]].reshape(len(rows), first.shape[1] // 3, 3)
        for rows in (first, second)
    )
    count = detected.shape[1]
    deviation = 2 * (np.array(SIGMAS) if count == len(SIGMAS) else np.full(count, np.mean(SIGMAS)))
    squared_distances = ((detected[..., :2] - theirs[..., :2]) ** 2).sum(axis=2)
    spread = 2 * deviation**2 * (second[:, -1:] + np.spacing(1))
    labelled = theirs[..., 2] > 0
    similarity = (np.exp(-squared_distances / spread) * labelled).sum(axis=1)
    return np.divide(
        similarity, labelled.sum(axis=1), out=np.zeros(len(similarity)), where=labelled.any(axis=1)
    )


def _find_overlaps(
    predictions: Sequence[DetectionPrediction],
    labels: Sequence[BoxLabels],
    detection_rows: np.ndarray,
    object_rows: np.ndarray,
    measure: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Overlaps:
    """The overlaps by this measure of `detection_rows`, one a detection, and `object_rows`, one an object."""
    numbers: dict[str, int] = {}
    object_classes, object_frames = _flat(labels, numbers)
    classes, frames = _flat(predictions, numbers)
    scores = np.array([score for frame in predictions for score in frame.scores], float)
    order = np.lexsort((-scores, frames))
    boxes = _boxes(predictions)[order]
    classes = classes[order]
    frames = frames[order]
    scores = scores[order]
    counts = np.bincount(frames, minlength=len(predictions))
    detection, seen, iou = _pairs(
        detection_rows[order], counts, object_rows, object_frames, measure
    )
    crowds = [frame.crowds or BoxLabels() for frame in labels]
    region_classes, region_frames = _flat(crowds, numbers)
    inside, region, share = _pairs(boxes, counts, _boxes(crowds), region_frames, _share)
    same = classes[inside] == region_classes[region]
    crowd = np.zeros(len(boxes))
    np.maximum.at(crowd, inside[same], share[same])
    return Overlaps(
        tuple(numbers),
        len(predictions),
        frames,
        classes,
        scores,
        object_frames,
        object_classes,
        detection,
        seen,
        iou,
        crowd,
    )


def _boxes(listed: Sequence[BoxLabels] | Sequence[DetectionPrediction]) -> np.ndarray:
    """The boxes (N, 4) of all frames."""
    return np.array([box for frame in listed for box in frame.boxes], float).reshape(-1, 4)


def _flat(
    listed: Sequence[BoxLabels] | Sequence[DetectionPrediction], numbers: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Class numbers (N,) and frames (N,) of all frames; new classes get the next number."""
    classes = np.array(
        [numbers.setdefault(name, len(numbers)) for frame in listed for name in frame.classes],
        np.int64,
    )
    frames = np.repeat(np.arange(len(listed)), [len(frame.boxes) for frame in listed])
    return classes, frames


def _pairs(
    boxes: np.ndarray,
    counts: np.ndarray,
    objects: np.ndarray,
    object_frames: np.ndarray,
    measure: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Detection, object and measure of the pairs in one frame with MIN_IOU or more, PAIRS_AT_ONCE compared at a time.

    `counts` are the detections of each frame.
    """
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    object_counts = np.bincount(object_frames, minlength=len(counts))
    first = np.cumsum(counts) - counts
    first_object = np.cumsum(object_counts) - object_counts
    many = counts * object_counts
    parts = np.flatnonzero(np.diff(np.cumsum(many) // PAIRS_AT_ONCE)) + 1
    for part in np.split(np.arange(len(counts)), parts):
        frame = np.repeat(part, many[part])
        place = np.arange(len(frame)) - np.repeat(np.cumsum(many[part]) - many[part], many[part])
        detection = first[frame] + place // np.maximum(object_counts[frame], 1)
        seen = first_object[frame] + place % np.maximum(object_counts[frame], 1)
        overlap = measure(boxes[detection], objects[seen])
        near = overlap >= MIN_IOU
        pairs.append((detection[near], seen[near], overlap[near]))
    detections, objects_seen, overlaps = (
        np.concatenate(column) for column in zip(*pairs, strict=True)
    )
    return detections, objects_seen, overlaps


def _iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """IoU of boxes (N, 4), x0 y0 x1 y1, with as many others, one by one; 0 where neither has an area."""
    shared = _intersection(first, second)
    union = sum((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)) - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _share(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Intersection over the area of the first; 0 where it has none."""
    shared = _intersection(first, second)
    area = (first[:, 2:] - first[:, :2]).prod(axis=1)
    return np.divide(shared, area, out=np.zeros_like(shared), where=area > 0)


def _intersection(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    sides = np.minimum(first[:, 2:], second[:, 2:]) - np.maximum(first[:, :2], second[:, :2])
    return np.clip(sides, 0, None).prod(axis=1)


def _rivals(
    detection: np.ndarray, seen: np.ndarray, iou: np.ndarray
) -> list[tuple[int, list[tuple[int, float]]]]:
    """The objects of each detection that has several, or rivals for one, in order."""
    objects_of: dict[int, list[tuple[int, float]]] = {}
    for detection_index, which, overlap in zip(
        detection.tolist(), seen.tolist(), iou.tolist(), strict=True
    ):
        objects_of.setdefault(detection_index, []).append((which, overlap))
    return list(objects_of.items())


MATCH_IOU = 0.5
NO_THRESHOLD = 0.5
"""The threshold where val holds nothing to choose it by."""


@dataclass(frozen=True)
class Matches:
    """Every detection of a list of frames that is not in a crowd: its score, whether it found an object, its frame.

    `objects` counts them per frame.
    """

    scores: np.ndarray
    hits: np.ndarray
    frames: np.ndarray
    objects: np.ndarray

    def counts(self, threshold: float = 0.0) -> np.ndarray:
        """Hits, detections and objects of each frame, int (frames, 3), for detections from `threshold` on."""
        scored = self.scores >= threshold
        size = len(self.objects)
        hits = np.bincount(self.frames[scored], weights=self.hits[scored], minlength=size)
        detections = np.bincount(self.frames[scored], minlength=size)
        return np.stack([hits.astype(np.int64), detections, self.objects], axis=1)


def match_frames(
    predictions: Sequence[Any],
    labels: Sequence[Any],
    measure: Callable[..., Overlaps] = overlaps_of,
    iou: float = MATCH_IOU,
) -> Matches:
    """Match detections with objects as `Overlaps.match` does, at an IoU; None is a frame without a prediction."""
    overlaps = measure(predictions, labels)
    matched = overlaps.match([iou])[0]
    counted = matched != IN_CROWD
    hits = matched[counted] != UNMATCHED
    return Matches(
        overlaps.scores[counted], hits, overlaps.frames[counted], overlaps.objects_per_frame()
    )


def find_in_crowds(prediction: DetectionPrediction, label: BoxLabels) -> set[int]:
    """Positions of the detections that find no object of `label` and lie in one of its crowds."""
    order = sorted(range(len(prediction.scores)), key=lambda index: -prediction.scores[index])
    matched = overlaps_of([prediction], [label]).match([MATCH_IOU])[0].tolist()
    return {index for index, match in zip(order, matched, strict=True) if match == IN_CROWD}


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


IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MAX_OF_A_CLASS = 100
"""Detections of one class that count in one frame, the best ones."""


def average_precision(overlaps: Overlaps, classes: Sequence[str]) -> dict[str, float]:
    """`map`, the mean over IoU 0.5 to 0.95, and `map50` at 0.5, 0..1; NaN where there are no objects at all.

    Sources: cocodataset.org/#detection-eval, all areas; the tests compare it with pycocotools. A class without objects
    counts for nothing.
    """
    matched = overlaps.match(IOU_THRESHOLDS.tolist())
    counts = _rank(overlaps) < MAX_OF_A_CLASS
    curves = []
    for number, name in enumerate(overlaps.names):
        objects = int(np.count_nonzero(overlaps.object_classes == number))
        if name in classes and objects:
            detections = np.flatnonzero((overlaps.classes == number) & counts)
            detections = detections[np.argsort(-overlaps.scores[detections], kind="stable")]
            curves.append(_precisions(matched[:, detections], objects))
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


def _precisions(matched: np.ndarray, objects: int) -> np.ndarray:
    """The best precision at each recall of RECALLS or above, (thresholds, 101), from matches, best score first."""
    right = np.cumsum(matched >= 0, axis=1, dtype=float)
    recall = right / objects
    precision = right / np.maximum(np.cumsum(matched != IN_CROWD, axis=1), 1)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    curves = np.zeros((len(matched), len(RECALLS)))
    for curve, reached, best in zip(curves, recall, precision, strict=True):
        at = np.searchsorted(reached, RECALLS, side="left")
        curve[at < len(best)] = best[at[at < len(best)]]
    return curves


CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = (
    "class", "location", "both", "duplicate", "background", "missed"
)  # fmt: skip
KINDS = (CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED)


@dataclass(frozen=True)
class ErrorType:
    """How often one kind of error was made, and by how much F1 would rise were these alone corrected."""

    count: int
    cost: float


def error_types(overlaps: Overlaps, threshold: float) -> dict[str, ErrorType]:
    """Every false alarm of a score from `threshold` on, and every object that none explains, by its kind.

    A false alarm is, by the IoU with what it fits best: LOCATION, MIN_IOU to MATCH_IOU with an object of its class;
    CLASS, MATCH_IOU or more with one of another; DUPLICATE, MATCH_IOU or more with one of its class that a better score
    found; BACKGROUND, below MIN_IOU with all; BOTH, anything else. MISSED are objects without a detection on
    which no error of class or location lies. Correcting one of these two gives its object a detection, if it has none;
    correcting a missed object removes it; correcting any other error removes the detection.
    """
    matched = overlaps.match([MATCH_IOU])[0]
    counted = (overlaps.scores >= threshold) & (matched != IN_CROWD)
    alarms = counted & (matched == UNMATCHED)
    lacking = np.ones(len(overlaps.object_frames), bool)
    lacking[matched[counted & (matched != UNMATCHED)]] = False
    kinds, target = _kinds(overlaps, lacking)
    counts = {
        kind: int(np.count_nonzero(alarms & (kinds == index)))
        for index, kind in enumerate(KINDS[:-1])
    }
    corrected = {
        kind: np.intersect1d(target[alarms & (kinds == KINDS.index(kind))], np.flatnonzero(lacking))
        for kind in (CLASS, LOCATION)
    }
    missed = int(np.count_nonzero(lacking)) - len(np.union1d(corrected[CLASS], corrected[LOCATION]))
    hits = int(np.count_nonzero(~lacking))
    detections = int(np.count_nonzero(counted))
    objects = len(lacking)
    now = f1_of(np.array([hits, detections, objects]))

    def cost(kind: str) -> float:
        right = len(corrected.get(kind, ()))
        gone = counts.get(kind, 0) - right
        there = objects - (missed if kind == MISSED else 0)
        return f1_of(np.array([hits + right, detections - gone, there])) - now

    return {kind: ErrorType(counts.get(kind, missed), cost(kind)) for kind in KINDS}


def _kinds(overlaps: Overlaps, lacking: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each detection, were it a false alarm, the position of its kind in KINDS, and the object it was meant for."""
    size = len(overlaps.scores)
    same = overlaps.same()
    same_class, own_at = _best(overlaps, same, size)
    other, other_at = _best(overlaps, ~same, size)
    taken, _ = _best(overlaps, same & ~lacking[overlaps.object], size)
    nearly = (same_class > 0) & (same_class < MATCH_IOU)
    choices = {
        LOCATION: nearly,
        CLASS: other >= MATCH_IOU,
        DUPLICATE: taken >= MATCH_IOU,
        BACKGROUND: (same_class == 0) & (other == 0),
    }
    kinds = np.select(
        list(choices.values()), [KINDS.index(kind) for kind in choices], KINDS.index(BOTH)
    )
    return kinds, np.where(nearly, own_at, other_at)


def _best(overlaps: Overlaps, among: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The best IoU of each detection among these pairs, 0 where there is none, and the object it is with."""
    detection = overlaps.detection[among]
    seen = overlaps.object[among]
    iou = overlaps.iou[among]
    order = np.argsort(iou, kind="stable")
    best = np.zeros(size)
    at = np.full(size, UNMATCHED, np.int64)
    best[detection[order]], at[detection[order]] = iou[order], seen[order]
    return best, at
