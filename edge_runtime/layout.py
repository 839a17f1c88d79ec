"""The order in which the weights of convolutions lie in the arena: as stored, or channels last as kernels read them.

PyTorch's convolutions on channels-last frames want weights in the order out, height, width, in; given another they
copy every weight in every run, which took ResNet-50 a fifth of its time (docs/engines.md). So the arena arranges a
weight once, when it has arrived, in its own place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.narrow import STORED, WIDE

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def convolutions(kinds: Kinds) -> frozenset[str]:
    """The tensors that are weights of two-dimensional convolutions, by shape. Narrow ones are widened as they lie."""
    dtypes = (WIDE, *STORED.values())
    return frozenset(name for name, (dtype, shape) in kinds.items() if dtype in dtypes and len(shape) == 4)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a tensor as it is stored."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a weight (out, in, height, width) that lies in the order out, height, width, in."""
    _, inner, height, width = shape
    return height * width * inner, 1, width * inner, inner


def moves_bytes(shape: tuple[int, ...]) -> bool:
    """Whether channels last is another order of the bytes: not for 1x1 kernels, nor one input channel."""
    return shape[1] > 1 and shape[2] * shape[3] > 1


def arrange(stored: Tensor) -> None:
    """Put a weight that lies as stored, row by row, in channels-last order where it is."""
    shape = tuple(stored.shape)
    stored.as_strided(shape, channels_last(shape)).copy_(stored.clone())
