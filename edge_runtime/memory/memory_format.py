"""The formats in which tensors lie in the arena: as stored, or as kernels read the weights of convolutions.

PyTorch's convolutions put a weight that lies otherwise into the order they want, in every run. The arena does it once,
when the weight has arrived, in its own place (docs/figures.md says what that is worth).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from models.quantization import WIDE

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of every tensor by name."""


class WeightFormat(IntEnum):
    """The order in which convolutions' weights are wanted; a later one is faster to run, and dearer to load."""

    STORED = 0
    CHANNELS_LAST = 1


@dataclass(frozen=True)
class Layout:
    """How a tensor of a dtype and shape lies in the arena: as stored, row by row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    arranged = False
    """Whether `arrange` has to be called when the stored bytes have arrived."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the arena."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def view(self, whole: Tensor, offset: int) -> Tensor:
        """The tensor that lies `offset` bytes into `whole`, the arena's memory seen as the dtype."""
        return whole.as_strided(self.shape, row_major_strides(self.shape), offset // self.dtype.itemsize)

    def arrange(self, whole: Tensor, offset: int) -> None:
        """Put what has arrived there as stored into this order."""

    def restore(self, whole: Tensor, offset: int) -> None:
        """Put what lies there in this order back as it is stored."""


@dataclass(frozen=True)
class ChannelsLast(Layout):
    """A convolution's weight (out, in, height, width) in the order out, height, width, in."""

    @property
    def arranged(self) -> bool:  # type: ignore[override]
        """Not for 1x1 kernels, nor one input channel: the bytes are the same in both formats."""
        return self.shape[1] > 1 and self.shape[2] * self.shape[3] > 1

    def view(self, whole: Tensor, offset: int) -> Tensor:
        """See `Layout.view`."""
        return whole.as_strided(self.shape, channels_last_strides(self.shape), offset // self.dtype.itemsize)

    def arrange(self, whole: Tensor, offset: int) -> None:
        """See `Layout.arrange`."""
        self.view(whole, offset).copy_(Layout.view(self, whole, offset).clone())

    def restore(self, whole: Tensor, offset: int) -> None:
        """See `Layout.restore`."""
        Layout.view(self, whole, offset).copy_(self.view(whole, offset).clone())


Layouts = Mapping[str, Layout]


def complete_layouts(kinds: Kinds, layouts: Layouts) -> dict[str, Layout]:
    """The layout of every tensor: one of those given, or as it is stored."""
    return {**{name: Layout(*kind) for name, kind in kinds.items()}, **layouts}


def channels_last_layouts(kinds: Kinds) -> dict[str, Layout]:
    """Channels last for the weights of two-dimensional convolutions, by shape; packed ones are widened as they lie."""
    dtypes = (WIDE, torch.float16, torch.int8)
    return {
        name: ChannelsLast(dtype, shape)
        for name, (dtype, shape) in kinds.items()
        if dtype in dtypes and len(shape) == 4
    }


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a tensor as it is stored."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a weight (out, in, height, width) that lies in the order out, height, width, in."""
    _, inner, height, width = shape
    return height * width * inner, 1, width * inner, inner
