"""What all detector families use: anchors, decoding, suppression of fixed shape, pixel targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import nms

from gemel.models.detector import BoxTarget
from gemel.models.preprocess import InputSize, height_width

DISTILL_BACKGROUND = 0.02
"""Weight, in distillation, of a box or cell in which neither model sees an object."""
PADDED_TO = 32
LARGEST_LOG_SIDE = math.log(1000 / 16)
"""A side grows by at most this power of e, so that a wild delta does not overflow (torchvision's BoxCoder)."""


class FixedBoxes:
    """A tensor of boxes that belongs to the architecture and not to its weights; one copy per device is kept."""

    def __init__(self, boxes: Tensor) -> None:
        self._copies = {boxes.device: boxes}
        self._first = boxes

    def __len__(self) -> int:
        return len(self._first)

    def on(self, device: torch.device | str) -> Tensor:
        """The boxes on a device."""
        device = torch.device(device)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = self._first.to(device)
        return self._copies[device]


def box_extent(input_size: InputSize) -> FixedBoxes:
    """Width, height, width and height of the input, f32 (4,): what turns boxes in fractions of it into pixels."""
    height, width = height_width(input_size)
    with torch.device("cpu"), torch.inference_mode(False):
        return FixedBoxes(torch.tensor([width, height, width, height], dtype=torch.float32))


def anchors_of(
    generator: AnchorGenerator, input_size: InputSize, grids: Sequence[tuple[int, int]]
) -> Tensor:
    """Anchors f32 (A, 4) x0 y0 x1 y1 in pixels of the input, map by map, as torchvision lays them.

    It lays them by whole divisions of the sides, having padded these to multiples of 32; where one is none, they
    lie at the maps' true strides, powers of two.
    """
    sides = height_width(input_size)
    whole = all(side % PADDED_TO == 0 for side in sides)
    strides = [
        [
            side // cells if whole else nearest_power(side / cells)
            for side, cells in zip(sides, grid, strict=True)
        ]
        for grid in grids
    ]
    with torch.device("cpu"), torch.inference_mode(False):
        return torch.cat(generator.grid_anchors([list(grid) for grid in grids], strides))  # type: ignore[arg-type]


def scale_anchors(generator: AnchorGenerator, factor: float) -> AnchorGenerator:
    """The same anchors, `factor` times as large."""
    sizes = tuple(tuple(size * factor for size in level) for level in generator.sizes)
    return AnchorGenerator(sizes, generator.aspect_ratios)


def nearest_power(stride: float) -> int:
    """The power of two nearest to a stride."""
    return 2 ** round(math.log2(stride))


def decode_boxes(deltas: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """Boxes from deltas (..., 4) against anchors (..., 4) that broadcast with them (Girshick et al. 2014, appendix C).

    `weights` are those of torchvision's BoxCoder, alike for x and y; its own decoding wants every anchor repeated.
    """
    side = anchors[..., 2:] - anchors[..., :2]
    centre = anchors[..., :2] + 0.5 * side
    centre = deltas[..., :2] / weights[0] * side + centre
    half = 0.5 * (deltas[..., 2:] / weights[2]).clamp(max=LARGEST_LOG_SIDE).exp() * side
    return torch.cat([centre - half, centre + half], dim=-1)


def pixel_targets(
    targets: Sequence[BoxTarget], extent: FixedBoxes, device: torch.device
) -> list[dict[str, Tensor]]:
    """Targets with boxes in pixels of the input and labels as torchvision counts them, from 1."""
    return [
        {
            "boxes": target.boxes.to(device) * extent.on(device),
            "labels": target.labels.to(device) + 1,
        }
        for target in targets
    ]


NOTHING = -1.0
"""The score of a row that holds no box."""


def suppress(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Scores (N, K) of boxes (N, K, 4), NOTHING where a stronger box of the frame overlaps by more than `iou`.

    On the meta device, where no value is known, nothing is suppressed: the worst case.
    """
    empty = (scores < 0)[..., None]
    # Rows without a box all take one place, so that the first of them suppresses the others at once.
    boxes = torch.cat(
        [boxes[..., :2].masked_fill(empty, 0), boxes[..., 2:].masked_fill(empty, 1)], dim=-1
    )
    winners = torch.stack(
        [_nms_mask(*frame, iou) for frame in zip(boxes.unbind(), scores.unbind())]
    )
    return torch.where(winners, scores, NOTHING)


def rows_where(mask: Tensor) -> Tensor:
    """Indices of the true entries of a mask (K,); all of them on the meta device, the worst case."""
    if mask.is_meta:
        return torch.arange(len(mask), device=mask.device)
    return mask.nonzero().squeeze(1)


def rows_at(values: Tensor, rows: Tensor) -> Tensor:
    """values (N, K, ...) at rows (N, M) of each frame: (N, M, ...)."""
    index = rows.reshape(*rows.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def _nms_mask(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    if boxes.is_meta:
        return torch.ones_like(scores, dtype=torch.bool)
    winners = torch.zeros_like(scores)
    winners[nms(boxes, scores, iou)] = 1
    return winners > 0
