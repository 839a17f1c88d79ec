"""Random changes of frames that carry their boxes along: mirror, zoom, shift, light and colour."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.detector import BoxTarget
from models.sent import sent

ZOOM = 1.4
"""A frame is enlarged or reduced by at most this factor."""
SHIFT = 0.15
"""A frame is moved by at most this fraction of its side."""
MIN_VISIBLE = 0.4
"""An object of which less than this share of its area stays in the frame is no longer a target."""
MIN_SIDE = 0.01


def augment_boxes(
    images: Tensor, targets: list[BoxTarget], generator: torch.Generator
) -> tuple[Tensor, list[BoxTarget]]:
    """Change each frame of a uint8 batch (N, 3, S, S) on its own; boxes follow."""
    frames = len(images)

    def draw(low: float, high: float) -> Tensor:
        return torch.rand(frames, generator=generator) * (high - low) + low

    scale = ZOOM ** draw(-1, 1)
    mirror = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    shift = torch.stack([draw(-SHIFT, SHIFT), draw(-SHIFT, SHIFT)], dim=1)
    changed = _recolour(_warp(images, scale, mirror, shift), draw)
    moved = [_move(t, float(scale[i]), float(mirror[i]), shift[i]) for i, t in enumerate(targets)]
    return changed, moved


def _warp(images: Tensor, scale: Tensor, mirror: Tensor, shift: Tensor) -> Tensor:
    """Place x at 0.5 + mirror * scale * (x - 0.5) + shift, in fractions of the side."""
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = mirror / scale
    theta[:, 1, 1] = 1 / scale
    # affine_grid maps output to input coordinates in -1..1: the inverse of the map above.
    theta[:, 0, 2] = -2 * shift[:, 0] * mirror / scale
    theta[:, 1, 2] = -2 * shift[:, 1] / scale
    grid = F.affine_grid(sent(theta, images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _recolour(images: Tensor, draw) -> Tensor:
    """Contrast, brightness and saturation of each frame; the result is uint8."""

    def each(values: Tensor) -> Tensor:
        return sent(values.view(-1, 1, 1, 1), images.device)

    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - mean) * each(draw(0.7, 1.3)) + mean * each(draw(0.7, 1.3))
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * each(draw(0.5, 1.5))
    return images.clamp_(0, 255).to(torch.uint8)


def _move(target: BoxTarget, scale: float, mirror: float, shift: Tensor) -> BoxTarget:
    centre = (target.boxes[:, :2] + target.boxes[:, 2:]) / 2
    half = (target.boxes[:, 2:] - target.boxes[:, :2]) / 2 * scale
    centre = 0.5 + (centre - 0.5) * scale * torch.tensor([mirror, 1.0]) + shift
    whole = torch.cat([centre - half, centre + half], dim=1)
    boxes = whole.clamp(0, 1)
    side = boxes[:, 2:] - boxes[:, :2]
    kept = (side.prod(dim=1) >= MIN_VISIBLE * (4 * half.prod(dim=1))) & (side.min(dim=1).values >= MIN_SIDE)
    return BoxTarget(boxes[kept], target.labels[kept])
