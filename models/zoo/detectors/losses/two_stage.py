"""What Faster R-CNN learns from: objects with weights, on sampled anchors and proposals (Ren et al. 2015, section 3.1).

A target holds `boxes` (M, 4) in pixels, `labels` (M,) from 1, and `weights` (M,) from 0 to 1: how surely it is an
object. With weights of 1 these are torchvision's losses; matching and sampling are torchvision's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

BETA = 1 / 9
"""Where smooth L1 turns from a square into a line."""
Target = dict[str, Tensor]


def proposal_loss(rpn: Any, objectness: Tensor, deltas: Tensor, anchors: Tensor, targets: Sequence[Target]) -> Tensor:
    """Loss of objectness logits (N, A) and box deltas (N, A, 4); `rpn` is a RegionProposalNetwork."""
    labels, matched = zip(*(_match(rpn.proposal_matcher, anchors, target) for target in targets))
    positive, negative = (torch.stack(masks).bool() for masks in rpn.fg_bg_sampler(list(labels)))
    sampled = (positive | negative).sum()
    weights = torch.stack([_at(t["weights"], rows) for t, rows in zip(targets, matched)])
    boxes = torch.stack([_at(t["boxes"], rows) for t, rows in zip(targets, matched)])
    chosen = positive | negative
    wanted = (weights * positive)[chosen]
    class_loss = F.binary_cross_entropy_with_logits(objectness[chosen], wanted)
    encoded = rpn.box_coder.encode_single(boxes[positive], anchors.expand(len(targets), -1, -1)[positive])
    return class_loss + _box_loss(deltas[positive], encoded, weights[positive]) / sampled


def region_loss(
    heads: Any,
    proposals: Sequence[Tensor],
    targets: Sequence[Target],
    classify: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Loss of sampled proposals, each (P, 4) in pixels; `classify` gives logits and deltas of rois (R, 5).

    `heads` is a RoIHeads. A region of an object of weight w is taught its class with w and the background with 1 - w.
    """
    picked, matched, labels, encoded = heads.select_training_samples(list(proposals), list(targets))
    frames = [torch.full_like(boxes[:, :1], index) for index, boxes in enumerate(picked)]
    logits, deltas = classify(torch.cat([torch.cat(frames), torch.cat(picked)], dim=1))
    weights = torch.cat([_at(target["weights"], rows) for target, rows in zip(targets, matched)])
    label, wanted = torch.cat(labels), torch.cat(encoded)
    background = torch.zeros_like(label)
    # A region of the background loses the same either way.
    is_label, is_background = (F.cross_entropy(logits, goal, reduction="none") for goal in (label, background))
    class_loss = (weights * is_label + (1 - weights) * is_background).mean()
    rows = (label > 0).nonzero().squeeze(1)
    own = deltas.unflatten(1, (-1, 4))[rows, label[rows]]
    return class_loss + _box_loss(own, wanted[rows], weights[rows]) / len(label)


def _match(matcher: Any, anchors: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Label of each anchor (A,): 1 an object, 0 background, -1 neither; and the row of the object it fits best."""
    if not len(target["boxes"]):
        return torch.zeros_like(anchors[:, 0]), torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)
    matched = matcher(box_iou(target["boxes"], anchors))
    labels = (matched >= 0).to(anchors.dtype)
    labels[matched == matcher.BETWEEN_THRESHOLDS] = -1
    return labels, matched.clamp(min=0)


def _at(values: Tensor, rows: Tensor) -> Tensor:
    """values (M, ...) at rows; zeros where there are none to take."""
    return values[rows] if len(values) else values.new_zeros(len(rows), *values.shape[1:])


def _box_loss(deltas: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    distance = F.smooth_l1_loss(deltas, wanted, beta=BETA, reduction="none").sum(dim=-1)
    return (distance * weights).sum()
