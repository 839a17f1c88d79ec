"""Detection: SSD's loss, distillation, decoding, F1 at IoU 0.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import batched_nms

from models.tasks.augment_boxes import augment_boxes
from models.tasks.base import Answer, Boxes, DetectionAnswer
from models.tasks.f1 import best_threshold, f1_of, match_frames
from models.tasks.ssd_loss import BoxTarget, distill_loss, ssd_loss

LEAST_SCORE = 0.01
NMS_IOU = 0.45
MOST_CANDIDATES = 300
MOST_DETECTIONS = 100
Outputs = tuple[Tensor, Tensor]


class Detection:
    """Objects with boxes. The metric is F1 at IoU 0.5, micro over classes. Outputs are logits and box deltas."""

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

    def loss(self, model: Any, outputs: Outputs, targets: list[BoxTarget]) -> Tensor:
        """SSD's loss, see `ssd_loss`."""
        return ssd_loss(model, outputs, targets)

    def distill(self, model: Any, outputs: Outputs, teacher: Outputs) -> Tensor:
        """Distance from the original's outputs, see `distill_loss`."""
        return distill_loss(outputs, teacher)

    def answers(
        self,
        model: Any,
        outputs: Outputs,
        sizes: Sequence[tuple[int, int]],
        classes: Sequence[str],
        min_score: float = 0.0,
    ) -> list[Answer]:
        """Decode, suppress what overlaps within a class, best first; never below LEAST_SCORE."""
        logits, deltas = outputs
        scores = logits.float().softmax(dim=-1)[..., 1:]
        default_boxes = model.default_boxes(logits.device)
        answers: list[Answer] = []
        for frame, size in enumerate(sizes):
            flat = scores[frame].flatten()
            candidates = (flat >= max(min_score, LEAST_SCORE)).nonzero().squeeze(1)
            if len(candidates) > MOST_CANDIDATES:
                candidates = candidates[flat[candidates].topk(MOST_CANDIDATES).indices]
            anchor, label = candidates // len(classes), candidates % len(classes)
            boxes = model.box_coder.decode_single(deltas[frame, anchor].float(), default_boxes[anchor]).clamp(0, 1)
            kept = batched_nms(boxes, flat[candidates], label, NMS_IOU)[:MOST_DETECTIONS]
            boxes = boxes[kept] * torch.tensor([*size, *size], device=boxes.device)
            answers.append(
                DetectionAnswer(
                    tuple(str(classes[index]) for index in label[kept].tolist()),
                    tuple(flat[candidates][kept].tolist()),
                    tuple(tuple(box) for box in boxes.tolist()),  # type: ignore[arg-type]
                )
            )
        return answers

    def tally(
        self, answer: DetectionAnswer | None, truth: Boxes, classes: Sequence[str], threshold: float = 0.0
    ) -> np.ndarray:
        """int64 (3,): hits, detections from `threshold` on, and objects of one frame."""
        return match_frames([answer], [truth]).counts(threshold)[0]

    def metric_of(self, total: np.ndarray) -> float:
        """F1 at IoU 0.5, micro over classes."""
        return f1_of(total)

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


def _target(truth: Boxes, size: tuple[int, int], classes: Sequence[str]) -> BoxTarget:
    wanted = [index for index, name in enumerate(truth.classes) if name in classes]
    labels = torch.tensor([classes.index(truth.classes[index]) + 1 for index in wanted], dtype=torch.int64)
    boxes = torch.tensor([truth.boxes[index] for index in wanted], dtype=torch.float32).reshape(-1, 4)
    boxes = (boxes / torch.tensor([*size, *size])).clamp(0, 1)
    real = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(dim=1)
    return BoxTarget(boxes[real], labels[real])
