"""Detection: what a detector of any family answers, learns from, and is measured by (F1 at IoU 0.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.detector import BoxTarget, Candidates, Detector
from models.tasks.augment_boxes import augment_boxes
from models.tasks.base import Answer, Boxes, DetectionAnswer
from models.tasks.f1 import best_threshold, f1_of, match_frames
from models.vision import torchvision

MIN_SCORE = 0.01
MAX_DETECTIONS = 100


class Detection:
    """Objects with boxes. The metric is F1 at IoU 0.5, micro over classes. The model is a `Detector`."""

    name = "detection"
    metric = "f1"

    def targets(
        self, truths: Sequence[Boxes], sizes: Sequence[tuple[int, int]], classes: Sequence[str]
    ) -> list[BoxTarget]:
        """Boxes in fractions of their frame; objects outside it or of no named class are left out."""
        return [_target(truth, size, classes) for truth, size in zip(truths, sizes, strict=True)]

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

    def answers(
        self,
        model: Detector,
        outputs: Any,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
    ) -> list[Answer]:
        """Decode, suppress what overlaps within a class, best first; never below MIN_SCORE."""
        frames = model.candidates(outputs, max(min_score, MIN_SCORE))
        return [_answer(found, model.nms_iou, size, classes) for found, size in zip(frames, sizes, strict=True)]

    def tallies(
        self,
        answers: Sequence[DetectionAnswer | None],
        truths: Sequence[Boxes],
        classes: Sequence[str],
        threshold: float = 0.0,
    ) -> np.ndarray:
        """int64 (N, 3): hits, detections from `threshold` on, and objects of each frame."""
        return match_frames(answers, truths).counts(threshold)

    def metric_of(self, total: np.ndarray) -> float:
        """F1 at IoU 0.5, micro over classes."""
        return f1_of(total)

    def one_error(self, truths: Sequence[Boxes], classes: Sequence[str]) -> float:
        """An object that is missed."""
        return 1 / max(1, sum(len(truth.boxes) for truth in truths))

    def choose_threshold(self, answers: Sequence[DetectionAnswer], truths: Sequence[Boxes]) -> float:
        """The threshold with the largest F1 on these frames."""
        return best_threshold(match_frames(answers, truths))

    def truth_of(self, answer: DetectionAnswer, threshold: float) -> Boxes:
        """The detections from `threshold` on."""
        kept = [index for index, score in enumerate(answer.scores) if score >= threshold]
        return Boxes(tuple(answer.classes[i] for i in kept), tuple(answer.boxes[i] for i in kept))

    def chance(self, classes: Sequence[str]) -> float:
        """No detector finds anything by chance."""
        return 0.0


def _answer(found: Candidates, nms_iou: float | None, size: tuple[int, int], classes: Sequence[str]) -> DetectionAnswer:
    if nms_iou is None:
        kept = found.scores.argsort(descending=True)[:MAX_DETECTIONS]
    else:
        kept = torchvision.ops.batched_nms(found.boxes, found.scores, found.labels, nms_iou)[:MAX_DETECTIONS]
    boxes = found.boxes[kept] * torch.tensor([*size, *size], device=found.boxes.device)
    return DetectionAnswer(
        tuple(str(classes[index]) for index in found.labels[kept].tolist()),
        tuple(found.scores[kept].tolist()),
        tuple(tuple(box) for box in boxes.tolist()),  # type: ignore[arg-type]
    )


def _target(truth: Boxes, size: tuple[int, int], classes: Sequence[str]) -> BoxTarget:
    wanted = [index for index, name in enumerate(truth.classes) if name in classes]
    labels = torch.tensor([classes.index(truth.classes[index]) for index in wanted], dtype=torch.int64)
    boxes = torch.tensor([truth.boxes[index] for index in wanted], dtype=torch.float32).reshape(-1, 4)
    boxes = (boxes / torch.tensor([*size, *size])).clamp(0, 1)
    real = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(dim=1)
    return BoxTarget(boxes[real], labels[real])
