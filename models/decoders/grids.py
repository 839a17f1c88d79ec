"""Grids of anchor points, and boxes of other forms as corners in fractions of the input."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemel.models.arrays import Array, constant, library_of
from gemel.models.preprocess import Size

Rows = np.ndarray | slice
ALL_ROWS = slice(None)


def corners(boxes: Array) -> Array:
    """Centre and sides (..., 4) -> x0 y0 x1 y1."""
    centre = boxes[..., :2]
    half = boxes[..., 2:4] / 2
    return library_of(boxes).concatenate([centre - half, centre + half], -1)


def fractions(boxes: Array, size: Size) -> Array:
    """Places (..., x, y, x, y ...) in pixels of an input (H, W) -> fractions of it."""
    return boxes / constant([size[1], size[0]] * (boxes.shape[-1] // 2), boxes)


def grid(size: Size, strides: Sequence[int], like: Array) -> tuple[Array, Array]:
    """The place (A, 2) as column and row, and the stride (A, 1), of each cell of each level, row by row.

    They are of the kind and on the device of other values.
    """
    places, steps = _grid(tuple(size), tuple(strides))
    if isinstance(like, np.ndarray):
        return places, steps
    return _device_grid(tuple(size), tuple(strides), like.device)


@functools.lru_cache(maxsize=32)
def _grid(size: Size, strides: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    places = []
    steps = []
    for stride in strides:
        rows, columns = (np.arange(-(-side // stride), dtype=np.float32) for side in size)
        x, y = np.meshgrid(columns, rows)
        places.append(np.stack([x, y], axis=-1).reshape(-1, 2))
        steps.append(np.full((len(places[-1]), 1), stride, np.float32))
    return np.concatenate(places), np.concatenate(steps)


@functools.lru_cache(maxsize=32)
def _device_grid(size: Size, strides: Sequence[int], device: Any) -> tuple[Any, Any]:
    """The grid on a device, where a copy at each step of training would wait for the device."""
    import torch

    with torch.inference_mode(False):
        places, steps = (torch.from_numpy(values).to(device) for values in _grid(size, strides))
        return places, steps
