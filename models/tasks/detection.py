"""Detection: objects with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from models.detector import BoxTarget, Candidates, Detector
from models.device import to_device
from models.metrics import best_threshold, f1_of, find_in_crowds, match_frames
from models.predictions import BoxLabels, DetectionPrediction, Prediction

ZOOM = 1.4
"""A frame is enlarged or reduced by at most this factor."""
SHIFT = 0.15
"""A frame is moved by at most this fraction of its side."""
MIN_VISIBLE = 0.4
"""An object with less than this fraction of its area in the frame is no longer a target."""
MIN_SIDE = 0.01


def augment_boxes(
    images: Tensor, targets: list[BoxTarget], generator: torch.Generator
) -> tuple[Tensor, list[BoxTarget]]:
    """Change each frame of a uint8 batch (N, 3, S, S) on its own; boxes follow."""
    frames = len(images)

    def draw(low: float, high: float) -> Tensor:
        return torch.rand(frames, generator=generator) * (high - low) + low

    scale = ZOOM ** draw(-1, 1)
    mirror = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    shift = torch.stack([draw(-SHIFT, SHIFT), draw(-SHIFT, SHIFT)], dim=1)
    changed = _recolour(_warp(images, scale, mirror, shift), draw)
    moved = [_move(t, float(scale[i]), float(mirror[i]), shift[i]) for i, t in enumerate(targets)]
    return changed, moved


def _warp(images: Tensor, scale: Tensor, mirror: Tensor, shift: Tensor) -> Tensor:
    """Place x at 0.5 + mirror * scale * (x - 0.5) + shift, in fractions of the side."""
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = mirror / scale
    theta[:, 1, 1] = 1 / scale
    # affine_grid maps output to input coordinates in -1..1: the inverse of the map above.
    theta[:, 0, 2] = -2 * shift[:, 0] * mirror / scale
    theta[:, 1, 2] = -2 * shift[:, 1] / scale
    grid = F.affine_grid(to_device(theta, images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _recolour(images: Tensor, draw) -> Tensor:
    """Contrast, brightness and saturation of each frame; the result is uint8."""

    def each(values: Tensor) -> Tensor:
        return to_device(values.view(-1, 1, 1, 1), images.device)

    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - mean) * each(draw(0.7, 1.3)) + mean * each(draw(0.7, 1.3))
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * each(draw(0.5, 1.5))
    return images.clamp_(0, 255).to(torch.uint8)


def _move(target: BoxTarget, scale: float, mirror: float, shift: Tensor) -> BoxTarget:
    centre = (target.boxes[:, :2] + target.boxes[:, 2:]) / 2
    half = (target.boxes[:, 2:] - target.boxes[:, :2]) / 2 * scale
    centre = 0.5 + (centre - 0.5) * scale * torch.tensor([mirror, 1.0]) + shift
    whole = torch.cat([centre - half, centre + half], dim=1)
    boxes = whole.clamp(0, 1)
    side = boxes[:, 2:] - boxes[:, :2]
    kept = (side.prod(dim=1) >= MIN_VISIBLE * (4 * half.prod(dim=1))) & (side.min(dim=1).values >= MIN_SIDE)
    return BoxTarget(boxes[kept], target.labels[kept])


MIN_SCORE = 0.01
MAX_DETECTIONS = 100


class Detection:
    """Objects with boxes. The metric is F1 at IoU 0.5, micro over classes. The model is a `Detector`."""

    name = "detection"
    metric = "f1"

    def targets(
        self, labels: Sequence[BoxLabels], sizes: Sequence[tuple[int, int]], classes: Sequence[str]
    ) -> list[BoxTarget]:
        """Boxes in fractions of their frame; objects of no named class are left out."""
        return [_target(boxes, size, classes) for boxes, size in zip(labels, sizes, strict=True)]

    def augment(
        self, images: Tensor, targets: list[BoxTarget], generator: torch.Generator
    ) -> tuple[Tensor, list[BoxTarget]]:
        """Mirror, zoom, shift, and change light and colour."""
        return augment_boxes(images, targets, generator)

    def loss(self, model: Detector, outputs: Any, targets: list[BoxTarget]) -> Tensor:
        """The loss of the detector's family."""
        return model.loss(outputs, targets)

    def distill(self, model: Detector, outputs: Any, teacher: Any) -> Tensor:
        """The distance from the original's outputs, as the detector's family measures it."""
        return model.distill(outputs, teacher)

    def predictions(
        self,
        model: Detector,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
    ) -> list[Prediction]:
        """Decode, suppress what overlaps within a class, best first; never below MIN_SCORE."""
        frames = model.candidates(outputs, max(min_score, MIN_SCORE))
        return [_prediction(found, model.nms_iou, size, classes) for found, size in zip(frames, sizes, strict=True)]

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

    def choose_threshold(self, predictions: Sequence[DetectionPrediction], labels: Sequence[BoxLabels]) -> float:
        """The threshold with the largest F1 on these frames."""
        return best_threshold(match_frames(predictions, labels))

    def labels_of(self, prediction: DetectionPrediction, threshold: float, label: BoxLabels | None = None) -> BoxLabels:
        """The detections from `threshold` on, without those in a crowd of `label`, and its crowds."""
        crowds = label.crowds if label else None
        kept = [index for index, score in enumerate(prediction.scores) if score >= threshold]
        if label and crowds:
            in_crowd = find_in_crowds(prediction, label)
            kept = [index for index in kept if index not in in_crowd]
        return BoxLabels(tuple(prediction.classes[i] for i in kept), tuple(prediction.boxes[i] for i in kept), crowds)

    def chance(self, classes: Sequence[str]) -> float:
        """0: no detector finds anything by chance."""
        return 0.0


def _prediction(
    found: Candidates, nms_iou: float | None, size: tuple[int, int], classes: Sequence[str]
) -> DetectionPrediction:
    if nms_iou is None:
        kept = found.scores.argsort(descending=True)[:MAX_DETECTIONS]
    else:
        kept = torchvision.ops.batched_nms(found.boxes, found.scores, found.labels, nms_iou)[:MAX_DETECTIONS]
    boxes = found.boxes[kept] * torch.tensor([*size, *size], device=found.boxes.device)
    return DetectionPrediction(
        tuple(str(classes[index]) for index in found.labels[kept].tolist()),
        tuple(found.scores[kept].tolist()),
        tuple(tuple(box) for box in boxes.tolist()),  # type: ignore[arg-type]
    )


def _target(labels: BoxLabels, size: tuple[int, int], classes: Sequence[str]) -> BoxTarget:
    wanted = [index for index, name in enumerate(labels.classes) if name in classes]
    indices = torch.tensor([classes.index(labels.classes[index]) for index in wanted], dtype=torch.int64)
    boxes = torch.tensor([labels.boxes[index] for index in wanted], dtype=torch.float32).reshape(-1, 4)
    return BoxTarget((boxes / torch.tensor([*size, *size])).clamp(0, 1), indices)
