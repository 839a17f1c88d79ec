"""Readers bring stored bytes into memory that the CPU can write: out of the store, or straight from storage."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import numpy as np

from edge_runtime.memory.placing import ALIGNMENT_BYTES, footprint_bytes
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

    Where the file system cannot read directly, through the page cache, which is told to forget the bytes.
    """

    def __init__(self, store: Store, memory: np.ndarray) -> None:
        if store.file is None:
            raise ValueError("a store in memory has no file")
        self._start, self._store = store.data_start, store.file
        self._file = os.dup(store.file.descriptor)
        self._direct = self._open_direct(memory)

    def _open_direct(self, memory: np.ndarray) -> bool:
        with suppress(OSError):
            # The very file, whatever stands at its path by now.
            direct = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_DIRECT)
            try:
                # The alignment that a device asks for shows in a read at the least aligned place that is used.
                os.preadv(direct, [memoryview(memory[:ALIGNMENT_BYTES])], self._start)  # type: ignore[arg-type]
                os.dup2(direct, self._file)
                return True
            finally:
                os.close(direct)
        return False

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        done, size = 0, footprint_bytes(nbytes)
        while done < nbytes:
            into = memoryview(memory[target + done : target + size])  # type: ignore[arg-type]
            read = os.preadv(self._file, [into], self._start + source + done)
            if not read:
                raise OSError(errno.EIO, "the bundle has become shorter")
            done += read
        self._store.check()
        if not self._direct:
            os.posix_fadvise(self._file, self._start + source, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)
