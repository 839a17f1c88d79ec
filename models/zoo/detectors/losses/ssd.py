"""What SSD learns from: which default box answers for which object, and the loss over the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou

from models.detector import BoxTarget

MATCH_IOU = 0.5
NEGATIVES_PER_POSITIVE = 3
DISTILL_BACKGROUND = 0.02
"""Weight of a default box in which neither the original nor the model sees anything."""


def match(default_boxes: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
    """Index of the object each default box answers for, (N, A), -1 for none (Liu et al. 2016, section 2.2).

    default_boxes (A, 4), boxes (N, M, 4), valid (N, M) marks the rows that are objects. A default box takes the object
    it overlaps most if the IoU is MATCH_IOU or more; every object also gets the default box that fits it best.
    """
    frames, objects = valid.shape
    if objects == 0:
        return torch.full((frames, len(default_boxes)), -1, device=default_boxes.device)
    iou = box_iou(boxes.flatten(0, 1), default_boxes).view(frames, objects, -1)
    iou = iou.masked_fill(~valid[..., None], -1)
    overlap, matched = iou.max(dim=1)
    matched[overlap < MATCH_IOU] = -1
    frame, row = valid.nonzero(as_tuple=True)
    matched[frame, iou.argmax(dim=2)[frame, row]] = row
    return matched


def ssd_loss(
    outputs: tuple[Tensor, Tensor], targets: Sequence[BoxTarget], default_boxes: Tensor, box_coder: BoxCoder
) -> Tensor:
    """Cross-entropy with hard negatives plus smooth L1 of the boxes, over the number of matched default boxes."""
    logits, deltas = outputs
    boxes, labels = _stack(targets, logits.device)
    matched = match(default_boxes, boxes, labels >= 0)
    positive = matched >= 0
    count = max(1, int(positive.sum()))
    frame, anchor = positive.nonzero(as_tuple=True)
    row = matched[frame, anchor]
    wanted = box_coder.encode_single(boxes[frame, row], default_boxes[anchor])
    box_loss = F.smooth_l1_loss(deltas[frame, anchor], wanted, reduction="sum")
    classes = torch.zeros_like(matched)
    classes[frame, anchor] = labels[frame, row] + 1  # logit 0 is the background's
    class_loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(matched.shape)
    negatives = class_loss.detach().masked_fill(positive, -1)
    wanted_negatives = (NEGATIVES_PER_POSITIVE * positive.sum(dim=1, keepdim=True)).clamp(min=NEGATIVES_PER_POSITIVE)
    rank = negatives.argsort(dim=1, descending=True).argsort(dim=1)
    counted = positive | ((rank < wanted_negatives) & (negatives >= 0))
    return (box_loss + class_loss[counted].sum()) / count


def distill_loss(outputs: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> Tensor:
    """Divergence of the class distributions and smooth L1 of the deltas, where the original sees objects.

    A default box weighs as much as either of the two believes in an object there, so that false alarms are unlearnt
    as well as misses; the sum is over the objects' mass in the original's answer, on the scale of `ssd_loss`.
    """
    logits, deltas = outputs
    teacher_logits, teacher_deltas = teacher
    target = teacher_logits.log_softmax(dim=-1)
    student = logits.log_softmax(dim=-1)
    seen = 1 - target[..., 0].exp()
    imagined = 1 - student.detach()[..., 0].exp()
    mass = seen.sum().clamp(min=1)
    divergence = F.kl_div(student, target, log_target=True, reduction="none").sum(dim=-1)
    class_loss = (divergence * (seen.maximum(imagined) + DISTILL_BACKGROUND)).sum()
    box_loss = (F.smooth_l1_loss(deltas, teacher_deltas, reduction="none").sum(dim=-1) * seen).sum()
    return (class_loss + box_loss) / mass


def _stack(targets: Sequence[BoxTarget], device: torch.device) -> tuple[Tensor, Tensor]:
    """Boxes (N, M, 4) and labels (N, M), which are -1 in the rows beyond a frame's objects."""
    most = max(len(target.labels) for target in targets)
    boxes = torch.zeros(len(targets), most, 4)
    labels = torch.full((len(targets), most), -1)
    for index, target in enumerate(targets):
        boxes[index, : len(target.labels)] = target.boxes
        labels[index, : len(target.labels)] = target.labels
    return boxes.to(device), labels.to(device)
