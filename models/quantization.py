"""Weights in fewer bits: symmetric codes with one scale per output channel, or float16.

A channel's weights are code * scale with codes from -max to max (`bits.max_code`). The scale of int8 is
max |weight| / 127 (Krishnamoorthi 2018, section 3.1.2). With fewer bits the scale minimises the channel's mean squared
error, and larger weights are clipped (Banner et al. 2019). Packing is a function of the weight alone, so queries that
share a weight share its packed tensor and scale.

Codes of less than a byte lie side by side, row by row, lowest bits first; a row is padded to whole bytes with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.bits import BIT_WIDTHS, BYTE, Bits, max_code


@dataclass(frozen=True)
class _Place:
    """Where every `period`th code stands: code `first` begins at bit `shift` of byte `byte` of its group's bytes."""

    first: int
    byte: int
    shift: int
    across: bool


def _places(bits: int) -> tuple[int, int, Iterator[_Place]]:
    """Codes and bytes of a group, which begins and ends with a byte, and the places of its codes."""
    period = BYTE // math.gcd(bits, BYTE)
    starts = (divmod(first * bits, BYTE) for first in range(period))
    places = (_Place(first, byte, shift, shift + bits > BYTE) for first, (byte, shift) in enumerate(starts))
    return period, period * bits // BYTE, places


def packed_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 (out, n), each below 2**bits, as uint8 (out, ceil(bits * n / 8))."""
    period, group, places = _places(bits)
    out, count = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -count % period))
    found = codes.new_zeros(out, codes.shape[1] // period * group)
    for place in places:
        own = codes[:, place.first :: period]
        found[:, place.byte :: group] |= own << place.shift
        if place.across:
            found[:, place.byte + 1 :: group] |= own >> (BYTE - place.shift)
    return found[:, : -(-bits * count // BYTE)].contiguous()


def unpack_bits(stored: Tensor, bits: int, out: Tensor) -> Tensor:
    """Write the codes of what `packed_bits` gave into `out` (out, n), of any dtype, and return it."""
    period, group, places = _places(bits)
    for place in places:
        into = out[:, place.first :: period]
        count = into.shape[1]
        own = stored[:, place.byte :: group][:, :count] >> place.shift
        if place.across:
            own |= stored[:, place.byte + 1 :: group][:, :count] << (BYTE - place.shift)
        into.copy_(own.bitwise_and_(2**bits - 1))
    return out


WIDE = torch.float32
MIN_BYTES = 4096
"""Smaller tensors stay as they are: together they weigh next to nothing."""
MIN_ROW = 16
"""Channels of fewer weights are stored as float16: beside a scale of 4 bytes, codes save little more."""
CLIPS = torch.logspace(math.log10(0.08), 0, 24).tolist()
"""The scales tried, as parts of the one that clips nothing; the least suits three codes and far outliers."""
SEEN = 1024
"""Weights of a channel that the scale is chosen on, evenly taken."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of `shape` (out, ...) as it is stored: codes with `scale` f32 (out,), or float16 without.

    `tensor` is of that shape, or uint8 (out, bytes) where a code has less than a byte (`terms.stored_shape`).
    """

    tensor: Tensor
    scale: Tensor | None
    width: Bits
    shape: tuple[int, ...]

    def wide(self) -> Tensor:
        """The float32 tensor that is used in its place."""
        return unpack(self.tensor, self.scale, self.width, torch.empty(self.shape, device=self.tensor.device))


def pack(weight: Tensor, width: Bits) -> PackedWeight:
    """A float32 weight (out, ...) as it is stored; ValueError where it holds what that cannot hold."""
    weight = weight.detach()
    if width == "fp16":
        stored, scale = weight.half(), None
        sound = stored
    else:
        rows, most = weight.reshape(len(weight), -1), max_code(width)
        sound = scale = scales_of(weight, width)
        codes = (rows / scale[:, None]).round_().clamp_(-most, most)
        if BIT_WIDTHS[width] < BYTE:
            stored = packed_bits(codes.add_(most).to(torch.uint8), BIT_WIDTHS[width])
        else:
            stored = codes.to(torch.int8).view(weight.shape)
    if not bool(torch.isfinite(sound).all()):
        raise ValueError(f"a weight that is not finite, or too large for {width}")
    return PackedWeight(stored.contiguous(), scale, width, tuple(weight.shape))


def scales_of(weight: Tensor, width: Bits) -> Tensor:
    """The scales (out,) of a weight (out, ...) in codes of this width: above zero, also for a channel of zeros."""
    rows, most, clipped = weight.detach().reshape(len(weight), -1), max_code(width), BIT_WIDTHS[width] < BYTE
    tiny = torch.finfo(WIDE).tiny
    largest = rows.abs().amax(1).clamp(min=tiny)
    unclipped = (largest / most).clamp(min=tiny)
    if not clipped:
        return unclipped
    some = rows[:, :: math.ceil(rows.shape[1] / SEEN)] / largest[:, None]  # within -1 and 1: squares stay in range
    best, least = torch.ones_like(largest), torch.full_like(largest, math.inf)
    for clip in CLIPS:
        error = some.mul(most / clip).round_().clamp_(-most, most).mul_(clip / most).sub_(some).square_().sum(1)
        best = torch.where(error < least, clip, best)
        least = torch.minimum(error, least)
    return (unclipped * best).clamp(min=tiny)


def unpack(stored: Tensor, scale: Tensor | None, width: Bits, out: Tensor) -> Tensor:
    """Write a stored tensor's float32 values into `out`, of the weight's shape, and return it.

    Where codes have less than a byte, `out` lies row by row, and about a byte for each weight is taken meanwhile.
    """
    if BIT_WIDTHS[width] < BYTE:
        unpack_bits(stored, BIT_WIDTHS[width], out.view(len(out), -1)).sub_(max_code(width))
    else:
        out.copy_(stored)
    # In two steps: one that converts and multiplies at once is four to six times slower on the CPU.
    return out if scale is None else out.mul_(scale.view(-1, *(1,) * (out.ndim - 1)))


def choices(key: str, shape: Sequence[int], width: Bits, head: bool = False) -> tuple[Bits, ...]:
    """How a state dict's float32 tensor may be stored when a width is asked for, fewest bits first.

    Empty for what stays wide: norms, biases, statistics and small tensors. A head, a residual and a layer whose
    channels are short (depthwise) are stored as float16 at least: codes would hurt most, or save little, there.
    """
    name = key.rpartition(".")[2]
    is_weight = name == "weight" or name.endswith("_weight")
    is_residual = name.startswith("residual_")
    if len(shape) < 2 or math.prod(shape) * WIDE.itemsize < MIN_BYTES or not (is_weight or is_residual):
        return ()
    short = math.prod(shape[1:]) < MIN_ROW
    widths = tuple(BIT_WIDTHS)
    return widths[widths.index("fp16" if head or is_residual or short else width) :]
