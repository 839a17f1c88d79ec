"""Widths of weights: stored in fewer bits and widened to float32 where used, int8 with scales per channel, or float16.

int8 is symmetric: a channel's weights are code * scale, codes -127 to 127 and scale = largest magnitude / 127, so that
no weight moves by more than half a scale (Krishnamoorthi 2018, section 3.1.2, per channel). Packing is a function of
the weight alone: what shares one weight shares one packed tensor and one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.parts.terms import MOST, Width

WIDE = torch.float32
STORED: dict[str, torch.dtype] = {"fp16": torch.float16, "int8": torch.int8}
LEAST_BYTES = 4096
"""Smaller tensors stay as they are: together they weigh next to nothing."""
LEAST_ROW = 16
"""Channels of fewer weights are stored as float16: beside a scale of 4 bytes, int8 saves little more."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor as it is stored: int8 with `scale` f32 (out,), or float16 without; `out` is its first dimension."""

    tensor: Tensor
    scale: Tensor | None = None

    @property
    def width(self) -> Width:
        """How it is stored."""
        return "fp16" if self.scale is None else "int8"

    def wide(self) -> Tensor:
        """The float32 tensor that is used in its place."""
        return widen(self.tensor, self.scale, torch.empty(self.tensor.shape, device=self.tensor.device))


def packed(weight: Tensor, width: Width) -> Packed:
    """A float32 weight (out, ...) as it is stored; ValueError where it holds what that cannot hold."""
    weight = weight.detach()
    if width == "fp16":
        stored, scale = weight.half(), None
        sound = stored
    else:
        rows = weight.reshape(len(weight), -1)
        # A channel of zeros needs a scale above zero, too.
        sound = scale = (rows.abs().amax(1) / MOST).clamp(min=torch.finfo(WIDE).tiny)
        codes = (rows / scale[:, None]).round().clamp(-MOST, MOST)
        stored = codes.to(torch.int8).view(weight.shape)
    if not bool(torch.isfinite(sound).all()):
        raise ValueError(f"a weight that is not finite, or too large for {width}")
    return Packed(stored.contiguous(), scale)


def widen(stored: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """Write a stored tensor's float32 values into `out`, of the same shape, and return it."""
    out.copy_(stored)
    # In two steps: one that converts and multiplies at once is four to six times slower on the CPU.
    return out if scale is None else out.mul_(scale.view(-1, *(1,) * (stored.ndim - 1)))


def choices(key: str, shape: Sequence[int], width: str, head: bool = False) -> tuple[Width, ...]:
    """How a state dict's float32 tensor may be stored when `width` ("fp16" or "int8") is asked for, fewest bits first.

    Empty for what stays wide: norms, biases, statistics and small tensors. A head, a residual and a layer whose
    channels are short (depthwise) are stored as float16 at least: int8 would hurt most, or save little, there.
    """
    name = key.rpartition(".")[2]
    is_weight = name == "weight" or name.endswith("_weight")
    is_residual = name.startswith("residual_")
    if len(shape) < 2 or math.prod(shape) * WIDE.itemsize < LEAST_BYTES or not (is_weight or is_residual):
        return ()
    short = math.prod(shape[1:]) < LEAST_ROW
    return ("fp16",) if width == "fp16" or head or is_residual or short else ("int8", "fp16")
