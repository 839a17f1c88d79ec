"""What YOLOv3 learns from: which anchor of which cell answers for which object, and the losses over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_iou

from models.detector import BoxTarget

IGNORE_IOU = 0.5
"""A box that overlaps an object by more is no false alarm, even if another anchor answers for it (section 2.1)."""
WIDEST = 6.0
"""Largest logarithm of a box's side over its anchor's: keeps exp finite while the weights are still random."""
DISTILL_BACKGROUND = 0.02
"""Weight of an anchor in which neither the original nor the model sees anything."""


class Priors(NamedTuple):
    """The A anchors of a frame, f32 (A, 2) each: column and row of the cell, columns and rows of its map, and width
    and height of the anchor in fractions of the frame.
    """

    cells: Tensor
    grids: Tensor
    sides: Tensor

    @classmethod
    def of(
        cls,
        grids: Sequence[tuple[int, int]],
        anchors: Sequence[Sequence[tuple[float, float]]],
        side: int,
        device: torch.device,
    ) -> Priors:
        """For maps of (rows, columns) `grids`; `anchors` in pixels of a frame of `side`, one list per map."""
        cells, sizes, sides = [], [], []
        for (rows, columns), boxes in zip(grids, anchors, strict=True):
            y, x = torch.meshgrid(
                torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
            )
            count = rows * columns
            cells.append(torch.stack([x, y], dim=-1).flatten(0, 1).repeat_interleave(len(boxes), dim=0).float())
            sizes.append(
                torch.tensor([columns, rows], dtype=torch.float32, device=device).expand(count * len(boxes), 2)
            )
            sides.append((torch.tensor(boxes, dtype=torch.float32, device=device) / side).repeat(count, 1))
        return cls(torch.cat(cells), torch.cat(sizes), torch.cat(sides))


def box_values(rows: Tensor, priors: Priors) -> Tensor:
    """Boxes (N, A, 4) x0 y0 x1 y1 in fractions of the frame, from rows (N, A, 4 or more)."""
    centre = (rows[..., :2].sigmoid() + priors.cells) / priors.grids
    half = rows[..., 2:4].clamp(max=WIDEST).exp() * priors.sides / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def assign(priors: Priors, boxes: Tensor) -> Tensor:
    """Which anchors answer for which of M objects: bool (M, A).

    Of all anchors the one whose shape overlaps the object's most answers, in the cell that holds its centre; two
    anchors of one shape on different maps both do.
    """
    centre, side = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2, boxes[:, None, 2:] - boxes[:, None, :2]
    common = torch.minimum(side, priors.sides).prod(dim=-1)
    overlap = common / (side.prod(dim=-1) + priors.sides.prod(dim=-1) - common)
    best = overlap >= overlap.amax(dim=1, keepdim=True) - 1e-6
    cell = torch.minimum((centre * priors.grids).floor(), priors.grids - 1)
    return best & (cell == priors.cells).all(dim=-1)


def yolo_loss(rows: Tensor, priors: Priors, targets: Sequence[BoxTarget]) -> Tensor:
    """YOLOv3's loss per object (section 2), with the gradients of darknet's src/yolo_layer.c.

    Binary cross-entropy for objectness, classes and the centre within its cell, half the squared error for the
    logarithm of width and height, the box terms weighted by 2 - width x height so that small objects count.
    """
    owner = torch.full(rows.shape[:2], -1, device=rows.device)
    counted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    seen = box_values(rows.detach(), priors)
    boxes = torch.cat([target.boxes for target in targets]).to(rows.device)
    labels = torch.cat([target.labels for target in targets]).to(rows.device)
    end = 0
    for frame, target in enumerate(targets):
        start, end = end, end + len(target.labels)
        if end > start:
            counted[frame] = box_iou(seen[frame], boxes[start:end]).amax(dim=1) <= IGNORE_IOU
            index, anchor = assign(priors, boxes[start:end]).nonzero(as_tuple=True)
            owner[frame, anchor] = start + index
    positive = owner >= 0
    objectness = F.binary_cross_entropy_with_logits(rows[..., 4], positive.float(), reduction="none")
    total = objectness[counted | positive].sum()
    frame, anchor = positive.nonzero(as_tuple=True)
    index, there = owner[frame, anchor], Priors(*(value[anchor] for value in priors))
    total = total + _of_objects(rows[frame, anchor], there, boxes[index], labels[index])
    return total / max(1, len(frame))


def distill_loss(rows: Tensor, teacher: Tensor) -> Tensor:
    """Distance of objectness, classes and boxes from the original's, where it sees objects.

    The objectness of an anchor weighs as much as either of the two believes in an object there, so that false alarms
    are unlearnt as well as misses; classes and boxes as much as the original does. The sum is over the objects' mass
    in the original's answer, on the scale of `yolo_loss`.
    """
    wanted = teacher[..., 4].sigmoid()
    imagined = rows[..., 4].detach().sigmoid()
    objectness = divergence(rows[..., 4], teacher[..., 4]) * (wanted.maximum(imagined) + DISTILL_BACKGROUND)
    classes = divergence(rows[..., 5:], teacher[..., 5:]).sum(dim=-1)
    centre = divergence(rows[..., :2], teacher[..., :2]).sum(dim=-1)
    side = (rows[..., 2:4] - teacher[..., 2:4]).square().sum(dim=-1) / 2
    return (objectness + wanted * (classes + centre + side)).sum() / wanted.sum().clamp(min=1)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of two probabilities given as logits; zero where they are equal."""
    wanted = teacher.sigmoid()
    least = F.binary_cross_entropy_with_logits(teacher, wanted, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") - least


def _of_objects(rows: Tensor, priors: Priors, boxes: Tensor, labels: Tensor) -> Tensor:
    """Box and class terms of the P anchors that answer for an object: rows (P, 5 + C), boxes (P, 4), labels (P,)."""
    centre, side = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    offset = (centre * priors.grids - priors.cells).clamp(0, 1)
    place = F.binary_cross_entropy_with_logits(rows[:, :2], offset, reduction="none").sum(dim=1)
    size = (rows[:, 2:4] - (side / priors.sides).log()).square().sum(dim=1) / 2
    wanted = F.one_hot(labels, rows.shape[1] - 5).float()
    classes = F.binary_cross_entropy_with_logits(rows[:, 5:], wanted, reduction="sum")
    return ((2 - side.prod(dim=1)) * (place + size)).sum() + classes
