"""Outlines of objects: polygons of masks and of rotated boxes, their overlap, and their place in a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemel.models.arrays import Array, library_of
from gemel.models.objects.candidates import Candidates
from gemel.models.predictions import Box, Outline
from gemel.models.preprocess import Preprocess

MIN_POINTS = 3
SUBCELL_BITS = 4
"""Of a place within a cell."""


@dataclass(frozen=True)
class OutlineConfig:
    """How masks become polygons, and how polygons are compared.

    Logits are resized `upscale` fold before they are traced, to half a pixel of Ultralytics' input. A polygon may leave
    out what is within `tolerance` pixels of that. Overlaps are counted on a grid of `cells` over the longer side of
    both outlines.
    """

    upscale: int = 8
    tolerance: float = 1.0
    cells: int = 256


CONFIG = OutlineConfig()


def outline_candidates(
    candidates: Candidates, size: tuple[int, int], preprocess: Preprocess | None = None
) -> tuple[Outline, ...]:
    """The outlines of candidates in pixels of a frame (width, height); none where they have neither masks nor corners.

    `preprocess` None squeezes the whole frame.
    """
    if candidates.corners is not None:
        placed = [[place_points(corners, size, preprocess)] for corners in candidates.corners]
    elif candidates.coefficients is not None and candidates.prototypes is not None:
        masks = zip(candidates.coefficients, candidates.boxes, strict=True)
        traced = [trace_mask(values, candidates.prototypes, box) for values, box in masks]
        placed = [
            [place_points(polygon, size, preprocess).clip(0, size) for polygon in parts]
            for parts in traced
        ]
    else:
        return ()
    return tuple(tuple(_as_points(polygon) for polygon in parts) for parts in placed)


def place_points(
    points: np.ndarray, size: tuple[int, int], preprocess: Preprocess | None
) -> np.ndarray:
    """Points (..., 2) in fractions of the input -> in pixels of a frame (width, height), or beside it."""
    if preprocess is not None:
        points = preprocess.place_in_frame(points.reshape(-1, 2), size).reshape(points.shape)
    return points * np.array(size, np.float32)


def trace_mask(
    coefficients: np.ndarray, prototypes: np.ndarray, box: np.ndarray
) -> list[np.ndarray]:
    """The polygons (P, 2), in fractions of the input, around what is likelier than not within a box (4,).

    Logits are sums of `prototypes` (M, h, w) by `coefficients` (M,). Holes are filled.
    """
    import cv2

    scale = CONFIG.upscale
    height, width = prototypes.shape[1:]
    sides = np.array([width, height])
    low = (np.floor(box[:2] * sides).astype(int) - 1).clip(0, None)
    high = np.minimum(np.ceil(box[2:] * sides).astype(int) + 1, sides)
    part = prototypes[:, low[1] : high[1], low[0] : high[0]]
    if not part.size:
        return []
    logits = np.tensordot(coefficients, part, 1).astype(np.float32)
    mask = cv2.resize(logits, None, fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR) > 0
    for axis in (0, 1):  # columns, then rows, whose centres are outside the box
        centres = (np.arange(mask.shape[1 - axis]) + 0.5) / scale + low[axis]
        outside = (centres < box[axis] * sides[axis]) | (centres > box[2 + axis] * sides[axis])
        mask[(slice(None), outside) if axis == 0 else outside] = False
    return [(polygon / scale + low) / sides for polygon in trace_pixels(mask)]


def trace_pixels(mask: np.ndarray) -> list[np.ndarray]:
    """The polygons (P, 2), through the centres of the outermost pixels, of a boolean mask (H, W)."""
    import cv2

    contours, _ = cv2.findContours(
        mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE
    )
    polygons = [
        cv2.approxPolyDP(contour, CONFIG.tolerance, True)[:, 0] + 0.5 for contour in contours
    ]
    return [polygon for polygon in polygons if len(polygon) >= MIN_POINTS]


def rotate_boxes(boxes: Array, angles: Array) -> Array:
    """Corners (..., 4, 2) of boxes (..., 4), centre and sides, turned by angles (...) in radians from x to y."""
    library = library_of(boxes)
    cosine = library.cos(angles)
    sine = library.sin(angles)
    across = library.stack([cosine, sine], -1) * boxes[..., 2:3] / 2
    down = library.stack([-sine, cosine], -1) * boxes[..., 3:4] / 2
    signs = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    return library.stack([boxes[..., :2] + x * across + y * down for x, y in signs], -2)


def _as_points(polygon: np.ndarray) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in polygon)


def outline_box(box: Box) -> Outline:
    """The four corners of an upright box."""
    x0, y0, x1, y1 = box
    return (((x0, y0), (x1, y0), (x1, y1), (x0, y1)),)


def outline_area(outline: Outline) -> float:
    """The area of the largest polygon."""
    import cv2

    return max((cv2.contourArea(np.array(polygon, np.float32)) for polygon in outline), default=0.0)


def outline_iou(first: Outline, second: Outline) -> float:
    """The intersection of what two outlines enclose, over the union; 0 where neither has an area."""
    if first == second:
        return float(outline_area(first) > 0)
    points = np.array(
        [point for outline in (first, second) for polygon in outline for point in polygon], float
    )
    if not len(points):
        return 0.0
    low = points.min(axis=0)
    extent = np.ptp(points, axis=0)
    cell = max(float(extent.max()), np.finfo(np.float32).tiny) / CONFIG.cells
    width, height = (max(1, int(np.ceil(side / cell))) for side in extent)
    masks = [fill_outline(outline, low, cell, (height, width)) for outline in (first, second)]
    union = np.count_nonzero(masks[0] | masks[1])
    return np.count_nonzero(masks[0] & masks[1]) / union if union else 0.0


def fill_outline(
    outline: Outline, low: Sequence[float] | np.ndarray, cell: float, shape: tuple[int, int]
) -> np.ndarray:
    """bool (H, W): the cells that an outline encloses or touches at their middle; the grid begins at `low` (x, y)."""
    import cv2

    mask = np.zeros(shape, np.uint8)
    for polygon in outline:
        places = ((np.array(polygon, float) - low) / cell - 0.5) * 2**SUBCELL_BITS
        cv2.fillPoly(mask, [places.round().astype(np.int32)], 1, shift=SUBCELL_BITS)
    return mask.astype(bool)
