"""The store: the bundle's tensors as bytes at known places, which is all that a mover needs to know of them."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.copies import Extent
from models.bundle import Bundle
from models.errors import BundleError


@dataclass(frozen=True, eq=False)
class Store:
    """Stored tensors: where each lies in `data`, and its dtype and shape.

    `data` holds the bytes (uint8, read-only, a view of the bundle's `mapping`). `file` and `data_start` say where the
    same bytes stand on disk, for movers that read them without the mapping; None for a store in memory.
    """

    extents: Mapping[str, Extent]
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    data: np.ndarray
    file: Path | None = None
    data_start: int = 0
    mapping: mmap.mmap | None = None

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Store:
        """The tensors of an open bundle, seen through its mapping; nothing is copied."""
        tensors = [entry for entry in bundle.header.entries.values() if not entry.is_pad]
        data = np.frombuffer(bundle.mapping, np.uint8, offset=bundle.header.data_start)
        kinds = {entry.name: (bundle.tensor(entry.name).dtype, entry.shape) for entry in tensors}
        return cls(
            {entry.name: Extent(entry.begin, entry.nbytes) for entry in tensors},
            kinds,
            data,
            bundle.path,
            bundle.header.data_start,
            bundle.mapping,
        )

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
            extent = extents[name]
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            data[extent.offset : extent.offset + extent.nbytes] = raw
        return cls(extents, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, data)

    def check(self) -> None:
        """`check_length` of the mapped file; a store in memory is whole."""
        if self.mapping is not None:
            check_length(self.mapping)

    def open_file(self) -> int:
        """A descriptor of the file that was mapped; BundleError when another one has taken its place since."""
        if self.file is None:
            raise ValueError("a store in memory has no file")
        descriptor = os.open(self.file, os.O_RDONLY)
        # The header is sealed and names every tensor by its content: equal headers, equal files.
        header = np.frombuffer(self.data.base, np.uint8, self.data_start)  # type: ignore[call-overload]
        if os.pread(descriptor, self.data_start, 0) != header.tobytes():
            os.close(descriptor)
            raise BundleError(self.file, "another file has taken its place since it was opened", "start the box again")
        return descriptor


def check_length(mapping: mmap.mmap) -> None:
    """OSError when the file behind a mapping has become shorter: to read what is gone would end the process."""
    if mapping.size() < len(mapping):
        raise OSError(errno.EIO, "the bundle has become shorter")
