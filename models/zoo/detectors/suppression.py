"""Non-maximum suppression with shapes that depend on nothing but the input's, so that a graph can hold it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import nms

NOTHING = -1.0
"""The score of a row that holds no box."""


def suppress(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Scores (N, K) of boxes (N, K, 4), NOTHING where a stronger box of the frame overlaps by more than `iou`.

    On the meta device, where no value is known, nothing is suppressed: the worst case.
    """
    empty = (scores < 0)[..., None]
    # Rows without a box all take one place, so that the first of them suppresses the others at once.
    boxes = torch.cat([boxes[..., :2].masked_fill(empty, 0), boxes[..., 2:].masked_fill(empty, 1)], dim=-1)
    kept = torch.stack([_kept(*frame, iou) for frame in zip(boxes.unbind(), scores.unbind())])
    return torch.where(kept, scores, NOTHING)


def rows_where(mask: Tensor) -> Tensor:
    """Indices of the true entries of a mask (K,); all of them on the meta device, the worst case."""
    if mask.is_meta:
        return torch.arange(len(mask), device=mask.device)
    return mask.nonzero().squeeze(1)


def rows_at(values: Tensor, rows: Tensor) -> Tensor:
    """values (N, K, ...) at rows (N, M) of each frame: (N, M, ...)."""
    index = rows.reshape(*rows.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def _kept(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    if boxes.is_meta:
        return torch.ones_like(scores, dtype=torch.bool)
    kept = torch.zeros_like(scores)
    kept[nms(boxes, scores, iou)] = 1
    return kept > 0
