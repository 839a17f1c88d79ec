"""Readers bring stored bytes into memory that the CPU can write: out of the store, or straight from storage."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import numpy as np

from edge_runtime.memory.placing import footprint_bytes
from edge_runtime.memory.store import Store


class Reader:
    """Brings stored bytes into memory: `read(memory, target, source, nbytes)`; raises OSError when it can't.

    It may write up to the next multiple of 512 bytes behind them, which no other tensor uses.
    """

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the file."""


class StoredReader(Reader):
    """Copies out of the store; the interpreter is let go meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        self._store.read(source, memory[target : target + nbytes])


class FileReader(Reader):
    """Reads from storage straight into the memory, past the page cache, so that no second copy stays in RAM.

    Where the file system, the device's alignment or the memory do not allow that, which a read shows, it is through the
    page cache from then on, which is told to forget the bytes. To make a reader touches no memory: a box that serves
    makes one for another bundle.
    """

    def __init__(self, store: Store) -> None:
        if store.file is None:
            raise ValueError("a store in memory has no file")
        self._start, self._store = store.data_start, store.file
        self._file, self._direct = os.dup(store.file.descriptor), False
        with suppress(OSError):
            # The very file, whatever stands at its path by now.
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
