"""Weights in a mapped file: memory is the page cache's, read in before a run and given back when it is needed.

Other mappings of the same file in this process, such as those that ONNX Runtime makes, are given back with it. Needs no
torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemel.edge_runtime.memory.allocator import Extent

MADV_RANDOM, MADV_DONTNEED, MADV_POPULATE_READ = 1, 4, 22
Range = tuple[int, int]
"""Bytes of the file from the first up to the second, which are whole pages."""


class _Region(NamedTuple):
    """Where bytes of the file from `offset` on lie in this process."""

    address: int
    offset: int
    nbytes: int


def page_ranges(extents: Iterable[Extent]) -> list[Range]:
    """The pages that hold these bytes, in order, neighbours joined."""
    ranges: list[Range] = []
    for extent in sorted(extents):
        if not extent.nbytes:
            continue
        start = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(extent.offset + extent.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    return ranges


def range_bytes(ranges: Iterable[Range]) -> int:
    """The bytes of these ranges."""
    return sum(end - start for start, end in ranges)


class MappedWeights:
    """A file of weights, mapped read-only. Raises OSError where the file cannot be mapped. Call it from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.nbytes = os.fstat(self._descriptor).st_size
            self._mapping = mmap.mmap(self._descriptor, self.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(self._descriptor)
            raise
        self.data = np.frombuffer(self._mapping, np.uint8)
        # A fault must not read what follows, which the schedule has not asked for.
        _advise(self._address, self.nbytes, MADV_RANDOM)
        self.bytes_read = 0
        """Bytes that were not in memory when they were loaded."""

    def view(self, extent: Extent, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Bytes of the file as an array over the mapping, read-only."""
        return self.data[extent.offset : extent.offset + extent.nbytes].view(dtype).reshape(shape)

    def load(self, extents: Iterable[Extent]) -> int:
        """Read the pages of these extents in; returns the bytes that were not in memory.

        OSError where the file became shorter, or cannot be read: touching its pages would end the process.
        """
        ranges = page_ranges(extents)
        if os.fstat(self._descriptor).st_size < self.nbytes:
            raise OSError(f"{self.path} was cut short while it is used; start the box again to prepare it anew")
        missing = range_bytes(ranges) - self._resident(ranges)
        if missing:
            self._populate(ranges)
        self.bytes_read += missing
        return missing

    def give_back(self, extents: Iterable[Extent]) -> int:
        """Give the pages of these extents back to the system; returns their bytes."""
        ranges = page_ranges(extents)
        self._drop(ranges)
        return range_bytes(ranges)

    def resident_bytes(self, extents: Iterable[Extent] | None = None) -> int:
        """Bytes of the pages of these extents, or of the file, that are in the page cache."""
        if extents is None:
            return self._resident([(0, -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)])
        return self._resident(page_ranges(extents))

    def close(self) -> None:
        """Close the file; the mapping goes with its last view."""
        os.close(self._descriptor)

    @property
    def _address(self) -> int:
        return self.data.ctypes.data

    def _resident(self, ranges: Iterable[Range]) -> int:
        """Where the system does not say it, nothing counts as resident."""
        total = 0
        for start, end in ranges:
            pages = (end - start) // mmap.PAGESIZE
            states = np.empty(pages, np.uint8)
            pointer = states.ctypes.data_as(ctypes.c_void_p)
            if _libc().mincore(ctypes.c_void_p(self._address + start), ctypes.c_size_t(end - start), pointer):
                return 0
            total += int((states & 1).sum()) * mmap.PAGESIZE
        return total

    def _populate(self, ranges: Iterable[Range]) -> None:
        """Read pages in; before Linux 5.14, which has no MADV_POPULATE_READ, each is touched."""
        for start, end in ranges:
            # The system reads the whole range at once, ahead of what asks for its pages.
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
            if not _advise(self._address + start, end - start, MADV_POPULATE_READ):
                continue
            if ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), f"{self.path} cannot be read")
            self.data[start : min(end, self.nbytes) : mmap.PAGESIZE].max()

    def _drop(self, ranges: list[Range]) -> None:
        if not ranges:
            return
        regions = self._regions()
        for start, end in ranges:
            for region in regions:
                first, last = max(start, region.offset), min(end, region.offset + region.nbytes)
                if first < last:
                    _advise(region.address + first - region.offset, last - first, MADV_DONTNEED)
            os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)

    def _regions(self) -> list[_Region]:
        """All mappings of the file in this process; its own alone where the system does not list them."""
        own = _Region(self._address, 0, -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        status = os.fstat(self._descriptor)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        regions = [own]
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return regions
        for line in lines:
            span, access, offset, on_device, inode, *path = line.split(maxsplit=5)
            # ONNX Runtime maps privately with leave to write, which it does not do; a shared one could lose something.
            if int(inode) != status.st_ino or access[1] + access[3] == "ws":
                continue
            # Some layered file systems list another device than they report, but the same path.
            if on_device != device and path != [str(self.path.resolve())]:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            regions.append(_Region(start, int(offset, 16), end - start))
        return regions


def _advise(address: int, nbytes: int, advice: int) -> int:
    return _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _libc() -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        raise OSError("pages are read in and given back on Linux only")
    return ctypes.CDLL(None, use_errno=True)
