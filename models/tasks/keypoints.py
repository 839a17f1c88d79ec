"""Keypoints: objects with boxes and points, measured by their similarity (OKS) instead of the IoU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gemel.models.measures.metrics import best_threshold, match_frames, pose_overlaps_of
from gemel.models.objects.candidates import BoxReader, suppress
from gemel.models.objects.outlines import place_points
from gemel.models.predictions import PoseLabels, PosePrediction
from gemel.models.preprocess import Preprocess
from gemel.models.tasks.detection import MIN_SCORE, Detection, keep_detections, name_boxes


class Keypoints(Detection):
    """Objects with boxes and points.

    The metric is F1 at an OKS of 0.5, micro over classes. The model is a `Detector` whose candidates have points.
    """

    name = "keypoints"
    metric = agreement = "oks_f1"
    overlaps = staticmethod(pose_overlaps_of)  # type: ignore[assignment]

    def predictions(  # type: ignore[override]
        self,
        reader: BoxReader,
        outputs: Sequence[np.ndarray],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[PosePrediction]:
        """As for detection, with the points of each object in pixels of the frame, and their scores."""
        frames = reader.candidates(outputs, max(min_score, MIN_SCORE))
        poses = []
        for candidates, size in zip(frames, sizes, strict=True):
            best = suppress(candidates, reader.nms_iou)
            assert best.points is not None
            detections = name_boxes(best, size, classes, preprocess)
            points = _place_points(best.points, size, preprocess).tolist()
            of_objects = tuple(tuple(tuple(point) for point in row) for row in points)
            poses.append(
                PosePrediction(detections.classes, detections.scores, detections.boxes, of_objects)
            )  # type: ignore[arg-type]
        return poses

    def tallies(
        self,
        predictions: Sequence[PosePrediction | None],  # type: ignore[override]
        labels: Sequence[PoseLabels],  # type: ignore[override]
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """int64 (N, 3): hits, detections from `threshold` on, and objects of each frame."""
        return match_frames(predictions, labels, pose_overlaps_of).counts(threshold)

    def choose_threshold(self, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
        """The threshold with the largest F1 on these frames."""
        return best_threshold(match_frames(predictions, labels, pose_overlaps_of))

    def labels_of(  # type: ignore[override]
        self, prediction: PosePrediction, threshold: float, label: PoseLabels | None = None
    ) -> PoseLabels:
        """The detections from `threshold` on, without those in a crowd of `label`, and its crowds."""
        places = keep_detections(prediction, threshold, label)
        crowds = label.crowds if label else None
        boxes = prediction.boxes
        points = prediction.points
        return PoseLabels(
            tuple(prediction.classes[index] for index in places),
            tuple(boxes[index] for index in places),
            crowds,
            tuple(points[index] for index in places),
        )

    def as_prediction(
        self, label: PoseLabels, size: tuple[int, int], classes: Sequence[str]
    ) -> PosePrediction:
        """Its objects, each with the score 1."""
        return PosePrediction(label.classes, (1.0,) * len(label.classes), label.boxes, label.points)


def _place_points(
    points: np.ndarray, size: tuple[int, int], preprocess: Preprocess | None
) -> np.ndarray:
    """Points (M, K, 3) in fractions of the input -> in pixels of a frame (width, height), with their scores."""
    places = place_points(points[..., :2], size, preprocess)
    if preprocess is not None and preprocess.resize != "stretch":
        places = places.clip(0, size)
    return np.concatenate([places, points[..., 2:]], axis=-1)
