"""The store: a bundle's tensors as bytes at known places, and readers that bring them into memory of the CPU."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.allocator import Extent, footprint_bytes
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

        OSError when they are gone, or not those that were verified.
        """
        if self.file is None:
            into[:] = self.data[source : source + into.size]
        else:
            self.file.read(self.data_start + source, memoryview(into))  # type: ignore[arg-type]


class StoreReader:
    """Brings stored bytes into memory: `read(memory, target, source, nbytes)`; raises OSError when it can't.

    It may write up to the next multiple of 512 bytes behind them, which no other tensor uses.
    """

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""


class CopyReader(StoreReader):
    """Copies out of the store, without the interpreter lock."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        self._store.read(source, memory[target : target + nbytes])


class DirectFileReader(StoreReader):
    """Reads from storage straight into the memory, past the page cache, so that no second copy stays in RAM.

    Where a read shows that the file system, the device's alignment or the memory do not allow that, later reads go
    through the page cache, whose pages are dropped after each. Making a reader touches no memory that kernels use.
    """

    def __init__(self, store: Store) -> None:
        if store.file is None:
            raise ValueError("a store in memory has no file")
        self._start, self._store = store.data_start, store.file
        self._file, self._direct = os.dup(store.file.descriptor), False
        with suppress(OSError):
            # The open file itself, whatever is at its path by now.
            direct = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_DIRECT)
            os.dup2(direct, self._file)
            os.close(direct)
            self._direct = True

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        done, size = 0, footprint_bytes(nbytes)
        while done < nbytes:
            into = memoryview(memory[target + done : target + size])  # type: ignore[arg-type]
            direct = self._direct
            try:
                read = os.preadv(self._file, [into], self._start + source + done)
            except OSError:
                if not direct:
                    raise
                os.dup2(self._store.descriptor, self._file)
                self._direct = False
                continue
            if not read:
                raise OSError(errno.EIO, "the bundle has become shorter")
            done += read
        self._store.check()
        if not self._direct:
            os.posix_fadvise(self._file, self._start + source, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)
