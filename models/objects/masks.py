"""Masks of segmentation: values of pixels that cover a part of a frame, resampled between grids."""

from __future__ import annotations

import numpy as np

IGNORED = 255
"""The value of pixels that are of no class: unlabelled, or outside what the network saw."""
Extent = tuple[float, float, float, float]
"""x0, y0, x1, y1 of what a mask covers, in pixels of a frame."""


def resample(mask: np.ndarray, extent: Extent, shape: tuple[int, int], onto: Extent) -> np.ndarray:
    """The mask, which covers `extent`, on a grid of `shape` (H, W) that covers `onto`, by nearest values.

    Both are in pixels of one frame; what lies outside `extent` is IGNORED.
    """
    if mask.shape == shape and extent == onto:
        return mask
    columns = _positions(extent[0], extent[2], mask.shape[1], onto[0], onto[2], shape[1])
    rows = _positions(extent[1], extent[3], mask.shape[0], onto[1], onto[3], shape[0])
    resampled = mask[
        np.clip(rows, 0, mask.shape[0] - 1)[:, None], np.clip(columns, 0, mask.shape[1] - 1)
    ]
    resampled[(rows < 0) | (rows >= mask.shape[0])] = IGNORED
    resampled[:, (columns < 0) | (columns >= mask.shape[1])] = IGNORED
    return resampled


def _positions(
    start: float, end: float, cells: int, onto_start: float, onto_end: float, count: int
) -> np.ndarray:
    """The cell of the one axis in which the centre of each cell of the other lies."""
    centres = onto_start + (np.arange(count) + 0.5) * (onto_end - onto_start) / count
    return np.floor((centres - start) / (end - start) * cells).astype(np.int64)
