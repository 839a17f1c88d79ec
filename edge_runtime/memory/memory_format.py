"""The formats of convolution weights in the arena: as stored (row-major), or channels last.

PyTorch's convolutions reorder a weight that is not in the format of their kernel, in every run. The arena reorders it
once, in place, when it has arrived; a GPU's pinned copy of the bundle is reordered before (docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum

import torch
from torch import Tensor

from models.quantization import WIDE

Kind = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""
Kinds = Mapping[str, Kind]
Layouts = Collection[str]
"""The names of the tensors that are channels last; all others are as stored."""


class WeightFormat(IntEnum):
    """The format in which an engine takes convolution weights; the later one is faster to run, slower to load."""

    STORED = 0
    CHANNELS_LAST = 1


def channels_last_layouts(kinds: Kinds) -> Layouts:
    """The weights of two-dimensional convolutions, recognised by shape; packed ones are unpacked in their order."""
    dtypes = (WIDE, torch.float16, torch.int8)
    return frozenset(name for name, (dtype, shape) in kinds.items() if dtype in dtypes and len(shape) == 4)


def changes_order(shape: tuple[int, ...]) -> bool:
    """Whether channels last differs from the stored order: not for 1x1 kernels, nor one input channel."""
    return shape[1] > 1 and shape[2] * shape[3] > 1


def tensor_view(memory: Tensor, offset: int, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The tensor `offset` bytes into `memory`, which is seen as the tensor's dtype."""
    strides = channels_last_strides(shape) if channels_last else row_major_strides(shape)
    return memory.as_strided(shape, strides, offset // memory.dtype.itemsize)


def reorder(memory: Tensor, offset: int, shape: tuple[int, ...], to_channels_last: bool) -> None:
    """Change the order of a tensor in place, from the stored order to channels last or back."""
    before = tensor_view(memory, offset, shape, not to_channels_last).clone()
    tensor_view(memory, offset, shape, to_channels_last).copy_(before)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a tensor as stored."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a weight (out, in, height, width) in the order out, height, width, in."""
    _, inner, height, width = shape
    return height * width * inner, 1, width * inner, inner
