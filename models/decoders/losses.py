"""Losses of imported models: distillation without labels for any outputs, and labels for any decoded boxes and scores.

Distillation compares outputs as they were before their last Sigmoid or Softmax, each channel in units of its spread
in the original, rows (anchors, tokens, pixels) weighted by the original's best score. Labelled detectors are trained
through their decoded boxes and scores, so that no family needs a loss of its own: objects are assigned to rows by
SimOTA (Ge et al., YOLOX, 2021) or one to one (Carion et al., DETR, 2020), and trained by varifocal loss (Zhang et al.,
VarifocalNet, 2021) and GIoU (Rezatofighi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou, generalized_box_iou_loss

from gemel.models.decoders.last_activations import Activation
from gemel.models.detector import BoxTarget, PoseTarget
from gemel.models.errors import InputError

Targets = Sequence[BoxTarget] | Sequence[PoseTarget]


@dataclass(frozen=True)
class LossConfig:
    """Tunables of the losses."""

    background: float = 0.02
    """Weight in distillation of a row in which neither model sees an object."""
    least_probability: float = 1e-5
    """Probabilities are compared as if at least this far from 0 and 1."""
    least_spread: float = 0.1
    """Smallest spread of a channel, as a fraction of the spread of the whole output."""
    box_weight: float = 2.5
    """Of GIoU beside the varifocal loss (PP-YOLOE)."""
    corner_weight: float = 5.0
    """Of the mean absolute difference of corners, in fractions of the input (DETR)."""
    focal_power: float = 2.0
    focal_background: float = 0.75
    """Power of the score, and weight, by which rows without an object count."""
    overlap_cost: float = 3.0
    """Of -log(IoU) beside -log(score) when rows are assigned (YOLOX)."""
    outside_cost: float = 1e5
    """Of a box whose centre is outside the object: taken only where no other is left."""
    counted_overlaps: int = 10
    """An object gets as many rows as the sum of so many best overlaps, at least one."""


CONFIG = LossConfig()


def distill_outputs(
    outputs: Sequence[Tensor],
    teacher: Sequence[Tensor],
    activations: Sequence[Tensor] | None = None,
    scores: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Scalar distance of a graph's float outputs from its original's.

    `activations` holds an Activation for each element of an output (1, ...), broadcastable to it; none without it.
    `scores` (N, R) are those of each output's rows, the larger of both models'; where there are none, a row counts by
    its most probable channel, and equally without probabilities. An output is (N, C), (N, R, C), (N, C, R) for scores
    of R rows, (N, C, H, W), or (N, ..., C).
    """
    losses = []
    for index, (student, theirs) in enumerate(zip(outputs, teacher, strict=True)):
        if not theirs.is_floating_point():
            continue
        weights = scores[index] if scores is not None else None
        count = None if weights is None else weights.shape[1]
        kind = torch.zeros(1) if activations is None else activations[index]
        kind = kind.to(theirs.device).expand(1, *theirs.shape[1:])
        if weights is None:
            probable = (
                torch.where(kind == Activation.NONE, 0, theirs)
                if bool(kind.any())
                else torch.ones_like(theirs)
            )
            weights = as_rows(probable, count).amax(dim=2)
        current, original = (
            as_rows(_before_activation(values, kind), count) for values in (student, theirs)
        )
        spread = original.std(dim=(0, 1), correction=0)
        spread = spread.clamp(
            min=CONFIG.least_spread * float(original.std(correction=0)) + CONFIG.least_probability
        )
        distance = F.smooth_l1_loss(current / spread, original / spread, reduction="none").mean(
            dim=2
        )
        weights = weights.clamp(0, 1) + CONFIG.background
        losses.append((weights * distance).sum() / weights.sum())
    return torch.stack(losses).mean() if losses else torch.zeros(())


def as_rows(output: Tensor, count: int | None = None) -> Tensor:
    """An output as (N, R, C): R = `count` where one of its two dimensions has that length."""
    if output.ndim == 2:
        return output[:, None] if count is None or output.shape[1] != count else output[:, :, None]
    if output.ndim == 3:
        return output.transpose(1, 2) if count == output.shape[2] != output.shape[1] else output
    if output.ndim == 4 and count != output.shape[1] * output.shape[2]:
        return output.flatten(2).transpose(1, 2)
    return output.flatten(1, -2)


def rows_by_level(scores: Tensor, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The part of the scores (N, A) that belongs to each output's rows; None where their sizes fit no level.

    Outputs of one level each differ in their rows; anchors begin with the finest level, which has most.
    """
    rows = [as_rows(output, scores.shape[1]).shape[1] for output in outputs]
    levels = sorted(set(rows), reverse=True)
    if sum(levels) == scores.shape[1]:
        parts = dict(zip(levels, scores.split(levels, dim=1)))
        return [parts[count] for count in rows]
    return [scores if count == scores.shape[1] else None for count in rows]


def _before_activation(output: Tensor, kind: Tensor) -> Tensor:
    near = CONFIG.least_probability
    logits = torch.where(kind == Activation.SIGMOID, output.logit(near), output)
    return torch.where(kind == Activation.SOFTMAX, output.clamp(min=near).log(), logits)


def dense_loss(
    boxes: Tensor, scores: Tensor, targets: Targets, points: Tensor | None = None
) -> Tensor:
    """Loss of a detector whose rows may answer for one object together: boxes (N, A, 4), scores (N, A, C).

    `points` (N, A, K, 3) are those of the rows, for targets that have points.
    """
    return _assigned_loss(boxes, scores, targets, points, _assign_dynamically)


def matched_loss(
    boxes: Tensor, scores: Tensor, targets: Targets, points: Tensor | None = None
) -> Tensor:
    """Loss of a detector of which one row answers for one object: boxes (N, Q, 4), scores (N, Q, C), and points."""
    return _assigned_loss(boxes, scores, targets, points, _assign_one_to_one)


def _assigned_loss(
    boxes: Tensor, scores: Tensor, targets: Targets, points: Tensor | None, assign
) -> Tensor:
    target_scores = torch.zeros_like(scores)
    of_points = scores.new_zeros(())
    chosen_boxes = [boxes.new_zeros(0, 4)]
    objects = [boxes.new_zeros(0, 4)]
    for frame, target in enumerate(targets):
        frame_boxes = target.boxes.to(boxes)
        labels = target.labels.to(boxes.device)
        if not len(labels):
            continue
        row, index = assign(boxes[frame].detach(), scores[frame].detach()[:, labels], frame_boxes)
        chosen_boxes.append(boxes[frame, row])
        objects.append(frame_boxes[index])
        target_scores[frame, row, labels[index]] = _overlap_of_pairs(
            boxes[frame, row].detach(), frame_boxes[index]
        ).to(scores.dtype)
        if points is not None and isinstance(target, PoseTarget):
            of_points = of_points + _point_distance(
                points[frame, row], target.points.to(boxes)[index]
            )
    predicted = torch.cat(chosen_boxes)
    labelled = torch.cat(objects)
    # A row of an object counts by its overlap, another one by how sure it wrongly is (varifocal loss).
    background = CONFIG.focal_background * scores.detach() ** CONFIG.focal_power
    weight = torch.where(target_scores > 0, target_scores, background)
    # torch takes nothing beyond 0 and 1; the loss of nan is nan all the same.
    probable = scores.nan_to_num().clamp(0, 1)
    classes = F.binary_cross_entropy(probable, target_scores, weight=weight, reduction="sum")
    classes = classes + 0 * scores.sum()
    overlaps = CONFIG.box_weight * generalized_box_iou_loss(predicted, labelled)
    corners = CONFIG.corner_weight * (predicted - labelled).abs().mean(dim=1)
    of_boxes = (overlaps + corners).sum()
    return (classes + of_boxes + CONFIG.corner_weight * of_points) / max(1, len(predicted))


def _point_distance(points: Tensor, labelled: Tensor) -> Tensor:
    """Of K points (M, K, 3) of M objects: how far the visible ones are, and how wrong their scores; one number."""
    if points.shape != labelled.shape:
        problem = f"the labels have {labelled.shape[1]} points, the model has {points.shape[1]}"
        raise InputError(
            "keypoints", problem, "label the points that the file's model finds", "data"
        )
    visible = (labelled[..., 2] > 0).to(points)
    far = (points[..., :2] - labelled[..., :2]).abs().mean(dim=2) * visible
    certain = F.binary_cross_entropy(
        points[..., 2].nan_to_num().clamp(0, 1), visible, reduction="none"
    )
    return (far + certain / points.shape[1]).mean(dim=1).sum()


@torch.no_grad()
def _assign_dynamically(boxes: Tensor, scores: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that answer for the M objects, and the object of each: boxes (A, 4), scores (A, M) of each object's class.

    SimOTA; the centre of a box stands for its row's place, since anchors are unknown.
    """
    overlap = box_iou(boxes, objects)
    centre = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
    inside = ((centre > objects[:, :2]) & (centre < objects[:, 2:])).all(dim=2)
    near = CONFIG.least_probability
    cost = -scores.clamp(min=near).log() - CONFIG.overlap_cost * overlap.clamp(min=near).log()
    cost += CONFIG.outside_cost * ~inside
    best = overlap.topk(min(CONFIG.counted_overlaps, len(boxes)), dim=0).values
    counts = best.sum(dim=0).long().clamp(min=1)
    chosen = cost.argsort(dim=0).argsort(dim=0) < counts
    contested = chosen.sum(dim=1, keepdim=True) > 1
    cheapest = F.one_hot(torch.where(chosen, cost, torch.inf).argmin(dim=1), len(objects)).bool()
    row, index = (chosen & (~contested | cheapest)).nonzero(as_tuple=True)
    return row, index


@torch.no_grad()
def _assign_one_to_one(boxes: Tensor, scores: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each object, and the objects' indices, as DETR matches them with scores in place of logits."""
    cost = CONFIG.corner_weight * torch.cdist(boxes, objects, p=1) / 4
    cost = cost - scores - CONFIG.box_weight * generalized_box_iou(boxes, objects)
    row, index = linear_sum_assignment(cost.cpu().nan_to_num(CONFIG.outside_cost).numpy())
    return torch.from_numpy(row).to(boxes.device), torch.from_numpy(index).to(boxes.device)


def _overlap_of_pairs(boxes: Tensor, theirs: Tensor) -> Tensor:
    """IoU of boxes (K, 4) row by row: (K,)."""
    side = (
        torch.minimum(boxes[:, 2:], theirs[:, 2:]) - torch.maximum(boxes[:, :2], theirs[:, :2])
    ).clamp(min=0)
    common = side.prod(dim=1)
    areas = [
        (corners[:, 2:] - corners[:, :2]).clamp(min=0).prod(dim=1) for corners in (boxes, theirs)
    ]
    return common / (sum(areas) - common).clamp(min=CONFIG.least_probability**2)
