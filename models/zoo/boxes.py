"""Boxes every detector family uses: anchors laid once for a fixed input and never stored, and their decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

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


def anchors_of(generator: Any, input_size: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Anchors f32 (A, 4) x0 y0 x1 y1 in pixels of the input, map by map; `generator` is one of torchvision's."""
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        frame = ImageList(torch.empty(1, 1, input_size, input_size), [(input_size, input_size)])
        return generator(frame, [torch.empty(1, 1, *grid) for grid in grids])[0]


def decode_boxes(deltas: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    """Boxes from deltas (..., 4) against anchors (..., 4) that broadcast with them (Girshick et al. 2014, appendix C).

    `weights` are those of torchvision's BoxCoder, alike for x and y; its own decoding wants every anchor repeated.
    """
    side = anchors[..., 2:] - anchors[..., :2]
    centre = anchors[..., :2] + 0.5 * side
    centre = deltas[..., :2] / weights[0] * side + centre
    half = 0.5 * (deltas[..., 2:] / weights[2]).clamp(max=LARGEST_LOG_SIDE).exp() * side
    return torch.cat([centre - half, centre + half], dim=-1)
