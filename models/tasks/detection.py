"""Detection: objects with boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from models.detector import BoxTarget, Candidates, Detector
from models.device import to_device
from models.evidence import ShownAnswers, find_too_few_objects
from models.metrics import best_threshold, f1_of, find_in_crowds, match_frames, overlaps_of
from models.predictions import BoxLabels, DetectionPrediction, Prediction, Task
from models.preprocess import Preprocess

ZOOM = 1.4
"""A frame is enlarged or reduced by at most this factor."""
SHIFT = 0.15
"""A frame is moved by at most this fraction of its side."""
MIN_VISIBLE = 0.4
"""An object with less than this fraction of its area in the frame is no longer a target."""
MIN_SIDE = 0.01


@dataclass(frozen=True)
class Changes:
    """What is done to each of N frames: `scale` (N,), `mirror` (N,) of -1 and 1, `shift` (N, 2) in fractions."""

    scale: Tensor
    mirror: Tensor
    shift: Tensor


def draw_changes(frames: int, generator: torch.Generator) -> Changes:
    """Changes of so many frames."""
    scale = ZOOM ** _draw(frames, generator, -1, 1)
    mirror = torch.where(_draw(frames, generator, 0, 1) < 0.5, -1.0, 1.0)
    shift = torch.stack([_draw(frames, generator, -SHIFT, SHIFT), _draw(frames, generator, -SHIFT, SHIFT)], dim=1)
    return Changes(scale, mirror, shift)


def _draw(frames: int, generator: torch.Generator, low: float, high: float) -> Tensor:
    return torch.rand(frames, generator=generator) * (high - low) + low


def augment_boxes(
    images: Tensor, targets: list[BoxTarget], generator: torch.Generator
) -> tuple[Tensor, list[BoxTarget]]:
    """Change each frame of a uint8 batch (N, 3, H, W) on its own; boxes follow."""
    changes = draw_changes(len(images), generator)
    moved = [
        _move(target, float(scale), float(mirror), shift)
        for target, scale, mirror, shift in zip(targets, changes.scale, changes.mirror, changes.shift, strict=True)
    ]
    return recolour(warp(images, changes), generator), moved


def warp(images: Tensor, changes: Changes, mode: str = "bilinear") -> Tensor:
    """Place x at 0.5 + mirror * scale * (x - 0.5) + shift, in fractions of the side."""
    scale, mirror, shift = changes.scale, changes.mirror, changes.shift
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = mirror / scale
    theta[:, 1, 1] = 1 / scale
    # affine_grid maps output to input coordinates in -1..1: the inverse of the map above.
    theta[:, 0, 2] = -2 * shift[:, 0] * mirror / scale
    theta[:, 1, 2] = -2 * shift[:, 1] / scale
    grid = F.affine_grid(to_device(theta, images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, mode=mode, padding_mode="border", align_corners=False)


def recolour(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, brightness and saturation of each frame; the result is uint8."""

    def each(low: float, high: float) -> Tensor:
        return to_device(_draw(len(images), generator, low, high).view(-1, 1, 1, 1), images.device)

    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - mean) * each(0.7, 1.3) + mean * each(0.7, 1.3)
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * each(0.5, 1.5)
    return images.clamp_(0, 255).to(torch.uint8)


def _move(target: BoxTarget, scale: float, mirror: float, shift: Tensor) -> BoxTarget:
    boxes, kept = move_boxes(target.boxes, scale, mirror, shift)
    return BoxTarget(boxes, target.labels[kept])


def move_boxes(boxes: Tensor, scale: float, mirror: float, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (M, 4) changed as `warp` changes their frame, and which are kept: those still visible."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]) / 2 * scale
    centre = 0.5 + (centre - 0.5) * scale * torch.tensor([mirror, 1.0]) + shift
    moved = torch.cat([centre - half, centre + half], dim=1).clamp(0, 1)
    side = moved[:, 2:] - moved[:, :2]
    kept = (side.prod(dim=1) >= MIN_VISIBLE * (4 * half.prod(dim=1))) & (side.min(dim=1).values >= MIN_SIDE)
    return moved[kept], kept


MIN_F1 = 0.5
"""Of an original that allows a conclusion."""
MIN_SCORE = 0.01
MAX_DETECTIONS = 100


class Detection(Task):
    """Objects with boxes. The metric is F1 at IoU 0.5, micro over classes. The model is a `Detector`."""

    name = "detection"
    overlaps = staticmethod(overlaps_of)
    metric = agreement = "f1"
    has_threshold = has_background = True
    unlabelled_threshold = 0.25
    footage = "objects"

    def targets(
        self,
        labels: Sequence[BoxLabels],
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        preprocess: Preprocess | None = None,
    ) -> list[BoxTarget]:
        """Boxes in fractions of the input; objects of no named class, or outside the input, are left out."""
        return [place_boxes(boxes, size, classes, preprocess)[0] for boxes, size in zip(labels, sizes, strict=True)]

    def augment(self, images: Tensor, targets: list | None, generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Mirror, zoom, shift, and change light and colour."""
        if targets is None:
            return recolour(warp(images, draw_changes(len(images), generator)), generator), None
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
        preprocess: Preprocess | None = None,
    ) -> list[Prediction]:
        """Decode, suppress what overlaps within a class, best first; never below MIN_SCORE."""
        frames = model.candidates(outputs, max(min_score, MIN_SCORE))
        suppressed = [suppress(found, model.nms_iou) for found in frames]
        return [name_boxes(one, size, classes, preprocess) for one, size in zip(suppressed, sizes, strict=True)]

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
        kept, crowds = keep_detections(prediction, threshold, label), label.crowds if label else None
        return BoxLabels(tuple(prediction.classes[i] for i in kept), tuple(prediction.boxes[i] for i in kept), crowds)

    def answers(self, label: BoxLabels, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes of the objects."""
        return label.classes

    def find_gap(self, labels: Sequence[Any], classes: Sequence[str], shown: ShownAnswers, target: float) -> str:
        """A detector needs so many objects."""
        return find_too_few_objects(shown, classes)

    def is_competent(self, reached: float, classes: Sequence[str]) -> bool:
        """No detector finds anything by chance, so its F1 itself counts."""
        return reached >= MIN_F1


def keep_detections(prediction: DetectionPrediction, threshold: float, label: BoxLabels | None) -> list[int]:
    """The places of the detections from `threshold` on that lie in no crowd of `label`."""
    kept = [index for index, score in enumerate(prediction.scores) if score >= threshold]
    if label and label.crowds:
        in_crowd = find_in_crowds(prediction, label)
        kept = [index for index in kept if index not in in_crowd]
    return kept


def suppress(found: Candidates, nms_iou: float | None) -> Candidates:
    """The best candidates, best first, without what overlaps a better one of its class."""
    if nms_iou is None:
        kept = found.scores.argsort(descending=True)[:MAX_DETECTIONS]
    else:
        kept = torchvision.ops.batched_nms(found.boxes, found.scores, found.labels, nms_iou)[:MAX_DETECTIONS]
    return type(found)(*(part[kept] for part in found))


def name_boxes(
    found: Candidates, size: tuple[int, int], classes: Sequence[str], preprocess: Preprocess | None
) -> DetectionPrediction:
    """Candidates of a frame (width, height), with boxes in its pixels and the names of their classes."""
    boxes = found.boxes if preprocess is None else preprocess.to_frame(found.boxes, size)
    boxes = boxes * torch.tensor([*size, *size], device=boxes.device)
    return DetectionPrediction(
        tuple(str(classes[index]) for index in found.labels.tolist()),
        tuple(found.scores.tolist()),
        tuple(tuple(box) for box in boxes.tolist()),  # type: ignore[arg-type]
    )


def place_boxes(
    labels: BoxLabels, size: tuple[int, int], classes: Sequence[str], preprocess: Preprocess | None
) -> tuple[BoxTarget, list[int]]:
    """The objects of named classes that the input shows, in its fractions; and their places among the labels."""
    wanted = [index for index, name in enumerate(labels.classes) if name in classes]
    indices = torch.tensor([classes.index(labels.classes[index]) for index in wanted], dtype=torch.int64)
    boxes = torch.tensor([labels.boxes[index] for index in wanted], dtype=torch.float32).reshape(-1, 4)
    boxes = boxes / torch.tensor([*size, *size])
    boxes = (boxes if preprocess is None else preprocess.from_frame(boxes, size)).clamp(0, 1)
    kept = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    rows = [row for row, is_kept in zip(wanted, kept.tolist(), strict=True) if is_kept]
    return BoxTarget(boxes[kept], indices[kept]), rows
