"""Detection: objects with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemel.models.measures.evidence import ShownAnswers, find_too_few_objects
from gemel.models.measures.metrics import (
    best_threshold,
    f1_of,
    find_in_crowds,
    match_frames,
    overlaps_of,
)
from gemel.models.objects.candidates import BoxReader, Candidates, suppress
from gemel.models.objects.outlines import outline_candidates
from gemel.models.predictions import BoxLabels, DetectionPrediction, Prediction, Task
from gemel.models.preprocess import Preprocess

MIN_F1 = 0.5
"""Of an original that allows a conclusion."""
MIN_SCORE = 0.01


class Detection(Task):
    """Objects with boxes. The metric is F1 at IoU 0.5, micro over classes: of masks or rotated boxes where predictions
    and labels have them (`models.measures.metrics.overlaps_of`).
    """

    name = "detection"
    answer, layout = "detections", "boxes"
    overlaps = staticmethod(overlaps_of)
    metric = agreement = "f1"
    has_threshold = has_background = has_boxes = has_decoder = True
    unlabelled_threshold = 0.25
    footage = "objects"

    def predictions(
        self,
        reader: BoxReader,
        outputs: Sequence[np.ndarray],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[Prediction]:
        """Decode, suppress what overlaps within a class, best first; never below MIN_SCORE."""
        frames = reader.candidates(outputs, max(min_score, MIN_SCORE))
        suppressed = [suppress(frame, reader.nms_iou) for frame in frames]
        return [
            name_boxes(frame, size, classes, preprocess)
            for frame, size in zip(suppressed, sizes, strict=True)
        ]

    def tallies(
        self,
        predictions: Sequence[DetectionPrediction | None],
        labels: Sequence[BoxLabels],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """int64 (N, 3): hits, detections from `threshold` on, and objects of each frame."""
        return match_frames(predictions, labels).counts(threshold)

    def metric_of(self, total: np.ndarray) -> float:
        """F1 at IoU 0.5, micro over classes."""
        return f1_of(total)

    def one_error(self, labels: Sequence[BoxLabels], classes: Sequence[str]) -> float:
        """A missed object."""
        return 1 / max(1, sum(len(boxes.boxes) for boxes in labels))

    def choose_threshold(
        self, predictions: Sequence[DetectionPrediction], labels: Sequence[BoxLabels]
    ) -> float:
        """The threshold with the largest F1 on these frames."""
        return best_threshold(match_frames(predictions, labels))

    def labels_of(
        self, prediction: DetectionPrediction, threshold: float, label: BoxLabels | None = None
    ) -> BoxLabels:
        """The detections from `threshold` on, without those in a crowd of `label`, and its crowds."""
        places = keep_detections(prediction, threshold, label)
        crowds = label.crowds if label else None
        return BoxLabels(
            tuple(prediction.classes[i] for i in places),
            tuple(prediction.boxes[i] for i in places),
            crowds,
            outlines=tuple(prediction.outlines[i] for i in places) if prediction.outlines else (),
        )

    def as_prediction(
        self, label: BoxLabels, size: tuple[int, int], classes: Sequence[str]
    ) -> DetectionPrediction:
        """Its objects, each with the score 1."""
        scores = (1.0,) * len(label.classes)
        return DetectionPrediction(label.classes, scores, label.boxes, outlines=label.outlines)

    def answers(self, label: BoxLabels, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes of the objects."""
        return label.classes

    def find_gap(
        self, labels: Sequence[Any], classes: Sequence[str], shown: ShownAnswers, target: float
    ) -> str:
        """A detector needs so many objects."""
        return find_too_few_objects(shown, classes)

    def is_competent(self, reached: float, classes: Sequence[str]) -> bool:
        """No detector finds anything by chance, so its F1 itself counts."""
        return reached >= MIN_F1


def keep_detections(
    prediction: DetectionPrediction, threshold: float, label: BoxLabels | None
) -> list[int]:
    """The places of the detections from `threshold` on that lie in no crowd of `label`."""
    places = [index for index, score in enumerate(prediction.scores) if score >= threshold]
    if label and label.crowds:
        in_crowd = find_in_crowds(prediction, label)
        places = [index for index in places if index not in in_crowd]
    return places


def name_boxes(
    candidates: Candidates,
    size: tuple[int, int],
    classes: Sequence[str],
    preprocess: Preprocess | None,
) -> DetectionPrediction:
    """Candidates of a frame (width, height), with boxes in its pixels and the names of their classes."""
    boxes = candidates.boxes if preprocess is None else preprocess.to_frame(candidates.boxes, size)
    boxes = boxes * np.array([*size, *size], np.float32)
    return DetectionPrediction(
        tuple(str(classes[index]) for index in candidates.labels.tolist()),
        tuple(candidates.scores.tolist()),
        tuple(tuple(box) for box in boxes.tolist()),  # type: ignore[arg-type]
        outlines=outline_candidates(candidates, size, preprocess),
    )
