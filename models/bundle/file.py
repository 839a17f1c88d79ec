"""The file of an open bundle: read by the descriptor it was opened with, so that bytes which are gone are an error.

A mapped page that the file lost meanwhile ends the process (SIGBUS). And what was hashed when the bundle was opened may
be changed in place: whoever relies on that says so with `proven`.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from models.errors import BundleError
from models.files.bounded import opened
from models.sizes import size_text

REMEDY_PATH = "give the path of a bundle"
MAX_HOLLOW_BYTES, MIN_PART = 1 << 30, 16
"""A larger file of which less than one in so many bytes is on the disk is a hole, not a bundle; it is not hashed."""
CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 512  # of st_blocks, whatever the disk's own


class Stamp(NamedTuple):
    """By what a change of a file shows without reading it."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(eq=False)
class BundleFile:
    """A regular file, open for as long as this lives. Safe between threads.

    `opened_as` is what it looked like at first. With `proven`, what it looked like when its bytes were hashed, `read`
    fails from the first change on.
    """

    path: Path
    descriptor: int
    proven: Stamp | None = None

    def __post_init__(self) -> None:
        self.opened_as = self.stamp()
        weakref.finalize(self, os.close, self.descriptor)

    def stamp(self) -> Stamp:
        """What it looks like now; the file that was opened, whatever stands at its path since."""
        found = os.fstat(self.descriptor)
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)

    def mapped(self) -> mmap.mmap:
        """All of it, read-only."""
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def read(self, begin: int, into: memoryview) -> None:
        """Fill `into` (bytes) from `begin` on; OSError where these are gone or no longer those that were proven."""
        self.read_unproven(begin, into)
        self.check()

    def check(self) -> None:
        """OSError where the file is not what it was when its bytes were proven; call it after bytes were read."""
        if self.proven is not None and self.stamp() != self.proven:
            raise OSError(errno.EIO, "the bundle was changed in place")

    def read_unproven(self, begin: int, into: memoryview) -> None:
        """The same of whatever stands there now."""
        done, wanted = 0, len(into)
        while done < wanted:
            read = os.preadv(self.descriptor, [into[done:]], begin + done)
            if not read:
                raise OSError(errno.EIO, "the bundle has become shorter")
            done += read


def is_open_as(file: BundleFile) -> bool:
    """Whether what stands at its path is this very file, as it was when it was opened."""
    try:
        found = os.stat(file.path)
    except OSError:
        return False
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns) == file.opened_as


def open_file(path: Path, remedy: str) -> BundleFile:
    """Open it; InputError when it cannot be read, BundleError when it is empty or hollow."""
    with opened(path, REMEDY_PATH) as file:
        found = os.fstat(file.fileno())
        if found.st_size == 0:
            raise BundleError(path, "the file is truncated: 0 bytes", remedy)
        held = found.st_blocks * _BLOCK_BYTES
        if found.st_size > MAX_HOLLOW_BYTES and held * MIN_PART < found.st_size:
            fault = f"of its {size_text(found.st_size)}, {size_text(held)} are on the disk: it was not copied whole"
            raise BundleError(path, fault, remedy)
        return BundleFile(path, os.dup(file.fileno()))
