"""Weights in fewer bits: symmetric integer codes with one scale per output channel, or float16.

A channel's weights are code * scale with codes from -max to max (`bits.max_code`). The scale of int8 is
max |weight| / 127 (Krishnamoorthi 2018, section 3.1.2). The scale of int4 minimises the channel's mean squared error,
and larger weights are clipped (Banner et al. 2019). Packing is a function of the weight alone, so queries that share a
weight share its packed tensor and scale.

Two int4 codes share a byte, row by row, the first in the low four bits, each stored as code + 7; the last half byte of
a row of odd length is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemel.models.bits import BIT_WIDTHS, BYTE, Bits, max_code

WIDE = torch.float32
MIN_BYTES = 4096
"""Smaller tensors stay float32: together they are below 1 % of a model."""
MIN_ROW = 16
"""Channels of fewer weights (depthwise) are stored in eight bits at least."""
MIN_CODED_ROW = 5
"""Channels of fewer weights are stored as float16: beside a scale of 4 bytes, codes save nothing."""
CLIPS = torch.logspace(math.log10(0.08), 0, 24).tolist()
"""Candidate scales as fractions of the one that clips nothing; the smallest suits channels with far outliers."""
MAX_SAMPLES = 1024
"""Weights of a channel, evenly spaced, on which its scale is chosen."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of `shape` (out, ...) as stored: integer codes with `scale` f32 (out,), or float16 without.

    `tensor` has that shape, or is uint8 (out, bytes) for int4 (`bits.stored_shape`).
    """

    tensor: Tensor
    scale: Tensor | None
    width: Bits
    shape: tuple[int, ...]

    def wide(self) -> Tensor:
        """The float32 tensor that is used in its place."""
        return unpack(
            self.tensor, self.scale, self.width, torch.empty(self.shape, device=self.tensor.device)
        )


def pack(weight: Tensor, bits: Bits, codes: Tensor | None = None) -> PackedWeight:
    """A float32 weight (out, ...) as stored, with the nearest codes, or for int4 with these int8 (out, ...).

    ValueError for values that are not finite or exceed float16.
    """
    weight = weight.detach()
    if bits == "fp16":
        stored = weight.half()
        scale = None
        values = stored
    else:
        rows = weight.reshape(len(weight), -1)
        limit = max_code(bits)
        values = scale = scales_of(weight, bits)
        if codes is None or bits != "int4":
            codes = (rows / scale[:, None]).round_().clamp_(-limit, limit)
        codes = codes.to(rows.device).reshape(rows.shape)
        stored = (
            _pack_nibbles(codes + limit)
            if bits == "int4"
            else codes.to(torch.int8).view(weight.shape)
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"a weight that is not finite, or too large for {bits}")
    return PackedWeight(stored.contiguous(), scale, bits, tuple(weight.shape))


def scales_of(weight: Tensor, bits: Bits) -> Tensor:
    """The scales (out,) of a weight (out, ...), above zero also for a channel of zeros."""
    rows = weight.detach().reshape(len(weight), -1)
    limit = max_code(bits)
    tiny = torch.finfo(WIDE).tiny
    largest = rows.abs().amax(1).clamp(min=tiny)
    unclipped = (largest / limit).clamp(min=tiny)
    if BIT_WIDTHS[bits] >= BYTE:
        return unclipped
    # In -1..1: squares stay in range.
    samples = rows[:, :: math.ceil(rows.shape[1] / MAX_SAMPLES)] / largest[:, None]
    best = torch.ones_like(largest)
    least = torch.full_like(largest, math.inf)
    for clip in CLIPS:
        codes = samples.mul(limit / clip).round_().clamp_(-limit, limit)
        error = codes.mul_(clip / limit).sub_(samples).square_().sum(1)
        best = torch.where(error < least, clip, best)
        least = torch.minimum(error, least)
    return (unclipped * best).clamp(min=tiny)


def unpack(stored: Tensor, scale: Tensor | None, bits: Bits, out: Tensor) -> Tensor:
    """Write a stored tensor's float32 values into `out` (contiguous for int4), of the weight's shape; returns it."""
    if bits == "int4":
        _unpack_nibbles(stored, out.view(len(out), -1)).sub_(max_code(bits))
    else:
        out.copy_(stored)
    # In two steps: one that converts and multiplies at once is four to six times slower on the CPU.
    return out if scale is None else out.mul_(scale.view(-1, *(1,) * (out.ndim - 1)))


def choices(key: str, shape: Sequence[int], bits: Bits, head: bool = False) -> tuple[Bits, ...]:
    """How a state dict's float32 tensor may be stored when `bits` are requested, fewest first.

    Empty for what stays float32: norms, biases, statistics and small tensors. Heads are stored as float16 at least,
    layers with short channels (depthwise) in eight bits, where fewer would hurt most or save little.
    """
    name = key.rpartition(".")[2]
    is_weight = name == "weight" or name.endswith("_weight")
    if len(shape) < 2 or math.prod(shape) * WIDE.itemsize < MIN_BYTES or not is_weight:
        return ()
    widths = tuple(BIT_WIDTHS)
    row = math.prod(shape[1:])
    least: Bits = "int4"
    if head or row < MIN_CODED_ROW:
        least = "fp16"
    elif row < MIN_ROW:
        least = "int8"
    return widths[max(widths.index(least), widths.index(bits)) :]


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Codes (out, n) from 0 to 14 as uint8 (out, ceil(n / 2))."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpack_nibbles(stored: Tensor, out: Tensor) -> Tensor:
    """Write the codes of `_pack_nibbles` into `out` (out, n), of any dtype."""
    out[:, ::2].copy_(stored & 15)
    out[:, 1::2].copy_(stored[:, : out.shape[1] // 2] >> 4)
    return out
