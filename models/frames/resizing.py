"""Frames made smaller, bit for bit as `torchvision.transforms.v2` does it, whose import takes two CPU-seconds."""

from __future__ import annotations

import platform

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate


def resized(frame: np.ndarray, side: int) -> Tensor:
    """uint8 RGB (H, W, 3) -> uint8 (3, side, side), bilinear and antialiased."""
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)
    if image.shape[1:] == (side, side):
        return image.contiguous()
    # Strides that leave no doubt of channels-last order: of one frame torch takes it for the other, which costs a copy.
    batch = image.as_strided((1, *image.shape), (image.numel(), *image.stride()))
    in_bytes = _in_bytes()
    small = interpolate(
        batch if in_bytes else batch.to(torch.float32), size=[side, side], mode="bilinear", antialias=True
    )
    return (small if in_bytes else small.round_().to(torch.uint8))[0]


def _in_bytes() -> bool:
    """Whether this processor resizes bytes faster than float32."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
