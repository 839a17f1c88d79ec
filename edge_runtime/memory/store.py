"""The store: the bundle's tensors as bytes at known places, which is all that a mover needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.copies import Extent
from models.bundle import Bundle
from models.bundle.format import BundleFile


@dataclass(frozen=True, eq=False)
class Store:
    """Stored tensors: where each lies in `data`, and its dtype and shape.

    `data` holds the bytes (uint8, read-only, a view of the mapped bundle). They are read from its `file`, from
    `data_start` on: a mapping ends the process when the file became shorter. None for a store in memory.
    """

    extents: Mapping[str, Extent]
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
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
            extent = extents[name]
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            data[extent.offset : extent.offset + extent.nbytes] = raw
        return cls(extents, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, data)

    def read(self, source: int, into: np.ndarray) -> None:
        """Copy stored bytes from `source` on into an array (uint8, contiguous).

        OSError when they are gone, or no longer those that were proven.
        """
        if self.file is None:
            into[:] = self.data[source : source + into.size]
        else:
            self.file.read(self.data_start + source, memoryview(into))  # type: ignore[arg-type]
