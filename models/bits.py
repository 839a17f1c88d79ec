"""What is said of a model's parts where no tensor is at hand: the words of arguments and manifests, codes, shapes.

A bundle is looked at without torch, so nothing here needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

LOW_RANK = "low_rank"
"""The argument of a model that asks for layers as two factors (models.parts.low_rank)."""
FACTORS = ("a", "b")
Bits = Literal["fp16", "int8", "int6", "int4", "int3", "int2"]
"""How a weight can be stored in fewer bits (models.quantization)."""
BIT_WIDTHS: dict[Bits, int] = {"int2": 2, "int3": 3, "int4": 4, "int6": 6, "int8": 8, "fp16": 16}
"""The bits of one weight by width, the fewest first."""
FP32: Final = "fp32"
WeightBits = Literal["fp32"] | Bits
WEIGHTS: tuple[WeightBits, ...] = (FP32, *reversed(BIT_WIDTHS))
WIDE_CODE = "F32"
"""What packed weights are widened to, as the container calls it."""
STORED_CODES: dict[Bits, str] = {"int2": "U8", "int3": "U8", "int4": "U8", "int6": "U8", "int8": "I8", "fp16": "F16"}
BYTE = 8


def with_ranks(model_args: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """A model's arguments with these ranks in place of those they had; without any, the plain architecture."""
    plain = {key: value for key, value in model_args.items() if key != LOW_RANK}
    return {**plain, LOW_RANK: dict(ranks)} if ranks else plain


def max_code(width: Bits) -> int:
    """The largest code of a width with a scale; the least is its negative, so that codes are symmetric."""
    return 2 ** (BIT_WIDTHS[width] - 1) - 1


def stored_shape(width: Bits, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what a weight (out, ...) is stored as: its own, or (out, bytes) for codes of less than a byte."""
    if BIT_WIDTHS[width] >= BYTE:
        return tuple(shape)
    return shape[0], -(-BIT_WIDTHS[width] * math.prod(shape[1:]) // BYTE)


def stored_bytes(width: Bits, shape: Sequence[int]) -> int:
    """Bytes of a weight (out, ...) as it is stored, without its scale."""
    return math.prod(stored_shape(width, shape)) * max(BIT_WIDTHS[width] // BYTE, 1)


def residual_shapes(weight: Sequence[int], groups: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a residual's a and b beside a weight (out, in, ...); ValueError when groups != 1 or the rank does
    not fit.
    """
    if groups != 1:
        raise ValueError(f"a convolution with {groups} groups cannot carry a residual")
    out, *inner = weight
    most = min(out, math.prod(inner))
    if not 1 <= rank <= most:
        raise ValueError(f"rank {rank} does not fit a weight of shape {tuple(weight)} (1 to {most})")
    return (rank, *inner), (out, rank, *(1,) * (len(inner) - 1))
