"""What RetinaNet and FCOS have in common: targets as torchvision's losses want them, and distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.detector import BoxTarget


def pixel_targets(targets: Sequence[BoxTarget], input_size: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Targets with boxes in pixels of the input and labels as torchvision counts them, from 1."""
    return [
        {"boxes": target.boxes.to(device) * input_size, "labels": target.labels.to(device) + 1} for target in targets
    ]


def distill_focal(logits: Tensor, teacher_logits: Tensor, box_distance: Tensor) -> Tensor:
    """Divergence of the classes' probabilities and `box_distance` (N, A), where an object is believed to be.

    Logits (N, A, C), each class with a sigmoid of its own. A location weighs as much as either of the two believes in
    an object there, boxes as much as the original does; the sum is over the objects' mass in the original's answer.
    Beliefs are squared as in the focal loss (Lin et al. 2017), since such detectors leave a few per cent everywhere.
    """
    target = teacher_logits.sigmoid()
    seen = target.amax(dim=-1).square()
    imagined = logits.detach().sigmoid().amax(dim=-1).square()
    entropy = F.binary_cross_entropy_with_logits(teacher_logits, target, reduction="none")
    divergence = (F.binary_cross_entropy_with_logits(logits, target, reduction="none") - entropy).sum(dim=-1)
    return (divergence * seen.maximum(imagined) + box_distance * seen).sum() / seen.sum().clamp(min=1)
