"""Grids of anchor points, and boxes of other forms as corners in fractions of the input."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from models.preprocess import Size


def corners(boxes: Tensor) -> Tensor:
    """Centre and sides (..., 4) -> x0 y0 x1 y1."""
    centre, half = boxes[..., :2], boxes[..., 2:4] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def fractions(boxes: Tensor, size: Size) -> Tensor:
    """Corners in pixels of an input (H, W) -> fractions of it."""
    return boxes / boxes.new_tensor([size[1], size[0]] * 2)


def grid(size: Size, strides: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The place (A, 2) as column and row, and the stride (A, 1), of each cell of each level, row by row."""
    return _grid(tuple(size), tuple(strides), device)


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _grid(size: Size, strides: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    places, steps = [], []
    for stride in strides:
        rows, columns = (torch.arange(-(-side // stride), device=device, dtype=torch.float32) for side in size)
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        places.append(torch.stack([x, y], dim=-1).flatten(0, 1))
        steps.append(torch.full((len(places[-1]), 1), float(stride), device=device))
    return torch.cat(places), torch.cat(steps)
