"""The bits in which a weight is stored: names, codes, shapes and sizes. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal

Bits = Literal["fp16", "int8", "int4"]
"""How a weight can be stored in fewer bits than float32 (models.quantization)."""
BIT_WIDTHS: dict[Bits, int] = {"int4": 4, "int8": 8, "fp16": 16}
"""Bits of one weight, the fewest first."""
FP32: Final = "fp32"
AUTO_BITS: Final = "auto"
WeightBits = Literal["auto", "fp32"] | Bits
"""What a merge may be asked for: the fewest bits, or, of itself, the fewest that hold."""
WEIGHTS: tuple[Literal["fp32"] | Bits, ...] = (FP32, *reversed(BIT_WIDTHS))
BITS_BY_OPTION: dict[WeightBits, tuple[Bits, ...]] = {
    AUTO_BITS: ("int8", "int4"), FP32: (), "fp16": ("fp16",), "int8": ("int8",), "int4": ("int4",),
}  # fmt: skip
"""The steps below float32 that each option tries, from the least change on."""
WIDE_CODE = "F32"
"""The container's dtype code of an unpacked weight."""
STORED_CODES: dict[Bits, str] = {"int4": "U8", "int8": "I8", "fp16": "F16"}
BYTE = 8


def main_bits(packed: Iterable[Bits]) -> str:
    """The bits of most of a model's packed weights, heads in float16 aside; fp32 where none is packed."""
    counts = Counter[str](packed)
    coded = [bits for bits in counts if bits != "fp16"]
    return max(coded or counts, key=lambda bits: (counts[bits], bits), default=FP32)


def max_code(bits: Bits) -> int:
    """The largest code of integer weights; the smallest is its negative, so that codes are symmetric."""
    return 2 ** (BIT_WIDTHS[bits] - 1) - 1


def stored_shape(bits: Bits, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a weight (out, ...) is stored: its own, or (out, bytes) where two codes share a byte."""
    if BIT_WIDTHS[bits] >= BYTE:
        return tuple(shape)
    return shape[0], -(-BIT_WIDTHS[bits] * math.prod(shape[1:]) // BYTE)


def stored_bytes(bits: Bits, shape: Sequence[int]) -> int:
    """Bytes of a stored weight (out, ...), without its scale."""
    return math.prod(stored_shape(bits, shape)) * max(BIT_WIDTHS[bits] // BYTE, 1)
