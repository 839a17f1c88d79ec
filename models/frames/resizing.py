"""Frames made smaller by torchvision, imported without torch's compiler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from models.compiler import without_compiler

with without_compiler():
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F


def resized(frame: np.ndarray, side: int) -> Tensor:
    """uint8 RGB (H, W, 3) -> uint8 (3, side, side), bilinear and antialiased."""
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)
    if image.shape[1:] == (side, side):
        return image.contiguous()
    return F.resize(image, [side, side], interpolation=InterpolationMode.BILINEAR, antialias=True)
