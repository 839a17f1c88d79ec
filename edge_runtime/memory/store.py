"""The store: a bundle's tensors as bytes at known places, and the formats in which convolution weights lie in memory.

PyTorch's convolutions reorder a weight that is not in the format of their kernel, in every run. The arena reorders it
once, in place, when it has arrived; a GPU's pinned copy of the bundle is reordered before (docs/engines.md).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gemel.edge_runtime.memory.allocator import Extent
from gemel.models.bundle import Bundle
from gemel.models.bundle.format import BundleFile
from gemel.models.quantization import WIDE

Kind = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""
Kinds = Mapping[str, Kind]
Layouts = Collection[str]
"""The names of the tensors that are channels last; all others are as stored."""


@dataclass(frozen=True, eq=False)
class Store:
    """Stored tensors: where each lies in `data`, and its dtype and shape.

    `data` holds the bytes (uint8, read-only, a view of the mapped bundle). They are read from its `file`, from
    `data_start` on: a mapping ends the process when the file became shorter. None for a store in memory.
    """

    extents: Mapping[str, Extent]
    kinds: Kinds
    data: np.ndarray
    file: BundleFile | None = None
    data_start: int = 0

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Store:
        """The tensors of an open bundle, seen through its mapping; nothing is copied."""
        tensors = [entry for entry in bundle.header.entries.values() if not entry.is_pad]
        data = np.frombuffer(bundle.mapping, np.uint8, offset=bundle.header.data_start)
        kinds = {entry.name: (bundle.tensor(entry.name).dtype, entry.shape) for entry in tensors}
        extents = {entry.name: Extent(entry.begin, entry.nbytes) for entry in tensors}
        return cls(extents, kinds, data, bundle.file, bundle.header.data_start)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Store:
        """Copies of tensors in memory, laid out in the order given as a bundle would."""
        extents: dict[str, Extent] = {}
        at = 0
        for name, tensor in tensors.items():
            extents[name] = Extent(at, tensor.nbytes)
            at = extents[name].end
        data = np.zeros(at, np.uint8)
        for name, tensor in tensors.items():
            offset, nbytes = extents[name]
            data[offset : offset + nbytes] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(extents, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, data)

    def read(self, source: int, into: np.ndarray) -> None:
        """Copy stored bytes from `source` on into an array (uint8, contiguous), without the interpreter lock.

        OSError when they are gone, or not those that were verified.
        """
        if self.file is None:
            into[:] = self.data[source : source + into.size]
        else:
            self.file.read(self.data_start + source, memoryview(into))  # type: ignore[arg-type]

    def drop_cached(self, source: int, nbytes: int) -> None:
        """Drop these bytes from the page cache, so that no second copy stays in RAM."""
        if self.file is not None:
            os.posix_fadvise(self.file.descriptor, self.data_start + source, nbytes, os.POSIX_FADV_DONTNEED)


def channels_last_layouts(kinds: Kinds) -> Layouts:
    """The weights of two-dimensional convolutions, recognised by shape; packed ones are unpacked in their order."""
    dtypes = (WIDE, torch.float16, torch.int8)
    return frozenset(name for name, (dtype, shape) in kinds.items() if dtype in dtypes and len(shape) == 4)


def changes_order(shape: tuple[int, ...]) -> bool:
    """Whether channels last differs from the stored order: not for 1x1 kernels, nor one input channel."""
    return shape[1] > 1 and shape[2] * shape[3] > 1


def tensor_view(memory: Tensor, offset: int, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The tensor `offset` bytes into `memory`, which is seen as the tensor's dtype."""
    strides = row_major_strides(shape)
    if channels_last:
        _, inner, height, width = shape
        strides = height * width * inner, 1, width * inner, inner
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
