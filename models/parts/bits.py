"""Codes of 2, 3, 4 or 6 bits side by side in bytes: row by row, the lowest bits first, no code across two rows.

The codes of a row, each lowest bit first, make one row of bits, which fills bytes from their lowest bits on; what is
left of the last byte is zero. numpy reads it: `unpackbits(row, count=bits * n, bitorder="little").reshape(n, bits)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.parts.terms import BYTE


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
