"""Keypoints: objects with boxes and points, measured by their similarity (OKS) instead of the IoU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.detector import Detector, PoseTarget
from models.device import to_device
from models.metrics import best_threshold, match_frames, pose_overlaps_of
from models.predictions import PoseLabels, PosePrediction
from models.preprocess import Preprocess
from models.tasks.detection import (
    MIN_SCORE,
    Changes,
    Detection,
    draw_changes,
    keep_detections,
    move_boxes,
    name_boxes,
    place_boxes,
    recolour,
    suppress,
    warp,
)


class Keypoints(Detection):
    """The metric is F1 at an OKS of 0.5, micro over classes. The model is a `Detector` whose candidates have points."""

    name = "keypoints"
    metric = agreement = "oks_f1"
    overlaps = staticmethod(pose_overlaps_of)  # type: ignore[assignment]

    def targets(  # type: ignore[override]
        self,
        labels: Sequence[PoseLabels],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[PoseTarget]:
        """Boxes and points in fractions of the input; points outside it are not visible."""
        found = []
        for label, size in zip(labels, sizes, strict=True):
            target, rows = place_boxes(label, size, classes, preprocess)
            width = len(label.points[0]) if label.points else 0
            points = torch.tensor([label.points[row] for row in rows], dtype=torch.float32).reshape(-1, width, 3)
            places = points[..., :2] / torch.tensor(size)
            if preprocess is not None:
                flat = places.reshape(-1, 2).repeat(1, 2)
                places = preprocess.from_frame(flat, size)[:, :2].reshape(places.shape)
            found.append(PoseTarget(*target, _hide_outside(places, points[..., 2])))
        return found

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Zoom, shift, and change light and colour; not mirrored, since left and right points would change places."""
        drawn = draw_changes(len(images), generator)
        changes = Changes(drawn.scale, torch.ones_like(drawn.mirror), drawn.shift)
        changed = recolour(warp(images, changes), generator)
        if targets is None:
            return changed, None
        moved = []
        for index, target in enumerate(targets):
            scale, shift = float(changes.scale[index]), changes.shift[index]
            boxes, kept = move_boxes(target.boxes, scale, 1.0, shift)
            places = 0.5 + (target.points[kept][..., :2] - 0.5) * scale + shift
            points = _hide_outside(places, target.points[kept][..., 2])
            moved.append(PoseTarget(boxes, target.labels[kept], points))
        return changed, moved

    def predictions(  # type: ignore[override]
        self,
        model: Detector,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
        preprocess: Preprocess | None = None,
    ) -> list[PosePrediction]:
        """As for detection, with the points of each object in pixels of the frame, and their scores."""
        frames = model.candidates(outputs, max(min_score, MIN_SCORE))
        found = []
        for candidates, size in zip(frames, sizes, strict=True):
            best = suppress(candidates, model.nms_iou)
            plain, points = name_boxes(best, size, classes, preprocess), best.points.float()  # type: ignore[attr-defined]
            places = points[..., :2]
            if preprocess is not None:
                places = preprocess.to_frame(places.reshape(-1, 2).repeat(1, 2), size)[:, :2].reshape(places.shape)
            places = places * to_device(torch.tensor(size), points.device)
            rows = torch.cat([places, points[..., 2:]], dim=-1).tolist()
            own = tuple(tuple(tuple(point) for point in row) for row in rows)
            found.append(PosePrediction(plain.classes, plain.scores, plain.boxes, own))  # type: ignore[arg-type]
        return found

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
        kept, crowds = keep_detections(prediction, threshold, label), label.crowds if label else None
        boxes, points = prediction.boxes, prediction.points
        return PoseLabels(
            tuple(prediction.classes[index] for index in kept), tuple(boxes[index] for index in kept), crowds,
            tuple(points[index] for index in kept),
        )  # fmt: skip

    def as_prediction(self, label: PoseLabels, size: tuple[int, int], classes: Sequence[str]) -> PosePrediction:
        """Its objects, each with the score 1."""
        return PosePrediction(label.classes, (1.0,) * len(label.classes), label.boxes, label.points)


def _hide_outside(places: Tensor, visible: Tensor) -> Tensor:
    """Points (M, K, 3) of places in fractions of the input; those outside it are 0 and not visible."""
    inside = ((places >= 0) & (places <= 1)).all(dim=-1)
    return torch.cat([places * inside[..., None], (visible * inside)[..., None]], dim=-1)
