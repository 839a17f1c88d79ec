"""Random changes of frames in training: zoom, shift, mirror, light and colour; boxes follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gemel.models.device import to_device

MAX_SHIFT = 0.08
"""A frame without boxes is shifted by at most this fraction of its side."""
ZOOM = 1.4
"""A frame is enlarged or reduced by at most this factor."""
SHIFT = 0.15
"""A frame is moved by at most this fraction of its side."""
MIN_VISIBLE = 0.4
"""An object with less than this fraction of its area in the frame is no longer a target."""
MIN_SIDE = 0.01


@dataclass(frozen=True)
class Changes:
    """What is done to each of N frames: `scale` (N,), `mirror` (N,) of -1 and 1, `shift` (N, 2) in fractions."""

    scale: Tensor
    mirror: Tensor
    shift: Tensor


def draw_changes(frames: int, generator: torch.Generator) -> Changes:
    """Changes of so many frames."""
    scale = ZOOM ** _draw(frames, generator, -1, 1)
    mirror = torch.where(_draw(frames, generator, 0, 1) < 0.5, -1.0, 1.0)
    shift = torch.stack([_draw(frames, generator, -SHIFT, SHIFT), _draw(frames, generator, -SHIFT, SHIFT)], dim=1)
    return Changes(scale, mirror, shift)


def _draw(frames: int, generator: torch.Generator, low: float, high: float) -> Tensor:
    return torch.rand(frames, generator=generator) * (high - low) + low


def warp(images: Tensor, changes: Changes, mode: str = "bilinear") -> Tensor:
    """Place x at 0.5 + mirror * scale * (x - 0.5) + shift, in fractions of the side."""
    scale, mirror, shift = changes.scale, changes.mirror, changes.shift
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = mirror / scale
    theta[:, 1, 1] = 1 / scale
    # affine_grid maps output to input coordinates in -1..1: the inverse of the map above.
    theta[:, 0, 2] = -2 * shift[:, 0] * mirror / scale
    theta[:, 1, 2] = -2 * shift[:, 1] / scale
    grid = F.affine_grid(to_device(theta, images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, mode=mode, padding_mode="border", align_corners=False)


def recolour(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, brightness and saturation of each frame; the result is uint8."""

    def each(low: float, high: float) -> Tensor:
        return to_device(_draw(len(images), generator, low, high).view(-1, 1, 1, 1), images.device)

    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - mean) * each(0.7, 1.3) + mean * each(0.7, 1.3)
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * each(0.5, 1.5)
    return images.clamp_(0, 255).to(torch.uint8)


def move_boxes(boxes: Tensor, scale: float, mirror: float, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (M, 4) changed as `warp` changes their frame, and which are kept: those still visible."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]) / 2 * scale
    centre = 0.5 + (centre - 0.5) * scale * torch.tensor([mirror, 1.0]) + shift
    moved = torch.cat([centre - half, centre + half], dim=1).clamp(0, 1)
    side = moved[:, 2:] - moved[:, :2]
    kept = (side.prod(dim=1) >= MIN_VISIBLE * (4 * half.prod(dim=1))) & (side.min(dim=1).values >= MIN_SIDE)
    return moved[kept], kept


def augment_frames(images: Tensor, generator: torch.Generator) -> Tensor:
    """A uint8 batch, each frame shifted by up to 8 % of its side and made brighter or darker."""
    n, channels, *sides = images.shape
    reach = [max(1, round(side * MAX_SHIFT)) for side in sides]
    offsets = torch.randint(0, 2 * max(reach) + 1, (n, 2), generator=generator)
    gains = to_device(torch.empty(n, 1, 1, 1).uniform_(0.8, 1.2, generator=generator), images.device)
    # Source row and column of each row and column of the result, clamped to the edge.
    rows, columns = (
        (offset[:, None] * far // max(reach) + torch.arange(-far, side - far)).clamp_(0, side - 1)
        for offset, far, side in zip(offsets.unbind(1), reach, sides, strict=True)
    )
    places = to_device(rows, images.device)[:, :, None] * sides[1] + to_device(columns, images.device)[:, None, :]
    found = images.flatten(2).gather(2, places.view(n, 1, -1).expand(-1, channels, -1)).view_as(images)
    return (found * gains).clamp_(0, 255).to(torch.uint8)
