"""Transfers into memory that the CPU can write: threads copy piece by piece, in load order."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gemel.edge_runtime.memory.allocator import Copy, Move
from gemel.edge_runtime.memory.store import Layouts, Store
from gemel.edge_runtime.memory.transfer import TransferBackend

PIECE_BYTES = 4 * 2**20
"""Small enough that the first layers arrive early, large enough that handing pieces out costs nothing."""
MADV_DONTNEED = 4


def allocate_memory(capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """Page-aligned RAM as a tensor and as an array of the same bytes."""
    region = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    # Written to, so that the pages exist and the first loads do not pay for them.
    return memory.zero_(), memory.numpy()


class CpuTransferBackend(TransferBackend):
    """Threads that copy out of a store into memory the CPU can write."""

    threads = 1
    """Copying a file's cached pages does not saturate the memory: a caller that waits for them and one thread take
    little more than half as long as one."""
    drops_cached = False
    """Whether pages of the file are dropped from the page cache once they are copied."""
    _bytes: np.ndarray

    def __init__(self, store: Store, capacity_bytes: int) -> None:
        self._store = store
        self.memory, self._bytes = self._allocate(capacity_bytes)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="transfer")

    def start(self, copies: Sequence[Copy], waits: bool = False, beside: bool = False) -> CpuTransfer:
        """See `TransferBackend.start`.

        A caller that waits copies too, and a single piece alone: waking a thread takes longer than a small load where
        the cores are busy.
        """
        if not beside:
            self.synchronise()
        transfer = CpuTransfer(copies, self._store, self._bytes, self.drops_cached)
        for _ in range(min(self.threads, len(transfer.pieces) - waits)):
            self._pool.submit(transfer.work)
        return transfer

    def compact(self, moves: Sequence[Move]) -> None:
        self.synchronise()
        for move in moves:
            # numpy detects the overlap and copies as if through a buffer.
            source = self._bytes[move.source : move.source + move.nbytes]
            self._bytes[move.target : move.target + move.nbytes] = source

    def release(self, spans: Iterable[tuple[int, int]]) -> None:
        """Give whole pages back to the system."""
        for start, end in spans:
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                address = ctypes.c_void_p(self._bytes.ctypes.data + first)
                ctypes.CDLL(None).madvise(address, ctypes.c_size_t(last - first), MADV_DONTNEED)

    def synchronise(self) -> None:
        """A run on the CPU is over when it returns."""

    def resize(self, capacity_bytes: int) -> None:
        self.memory, self._bytes = torch.empty(0, dtype=torch.uint8), np.empty(0, np.uint8)
        self.memory, self._bytes = self._allocate(capacity_bytes)

    def prepare(self, store: Store, layouts: Layouts) -> Store:
        """The store itself."""
        return store

    def take(self, source: Store, capacity_bytes: int | None, kept: Sequence[Move]) -> None:
        self.synchronise()
        self._store = source
        if capacity_bytes is None:
            return
        if not kept:
            self.resize(capacity_bytes)
            return
        memory, into = self._allocate(capacity_bytes)
        for move in kept:
            into[move.target : move.target + move.nbytes] = self._bytes[move.source : move.source + move.nbytes]
        self.memory, self._bytes = memory, into

    def drop(self, source: Store) -> None:
        """Nothing was taken for it."""

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _allocate(self, capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
        """Memory as a tensor and as an array of the same bytes."""
        return allocate_memory(capacity_bytes)


class _Piece(NamedTuple):
    source: int
    target: int
    nbytes: int


class CpuTransfer:
    """Pieces of copies that threads work off in order; a tensor is there when all pieces up to its end are."""

    def __init__(self, copies: Sequence[Copy], store: Store, memory: np.ndarray, drops_cached: bool = False) -> None:
        self._store, self._memory, self._drops_cached = store, memory, drops_cached
        self.pieces: list[_Piece] = []
        self._last: dict[str, int] = {}
        for copy in copies:
            first = len(self.pieces)
            self.pieces += [
                _Piece(copy.source + at, copy.target + at, min(PIECE_BYTES, copy.nbytes - at))
                for at in range(0, copy.nbytes, PIECE_BYTES)
            ]
            self._last.update((name, first + (end - 1) // PIECE_BYTES) for name, end in zip(copy.names, copy.ends))
        self.names = frozenset(self._last)
        self._changed = threading.Condition()
        self._begun = self._running = self._arrived = 0
        self._done = [False] * len(self.pieces)
        self._stopped = False
        self._error: OSError | None = None
        self._began_s = self._ended_s = 0.0

    @property
    def failed(self) -> bool:
        return self._error is not None

    def work(self) -> None:
        """Copy pieces until none is left; run by the backend's threads."""
        self._copy_up_to(len(self.pieces))

    def wait(self, names: Iterable[str]) -> None:
        """See `Transfer.wait`; the caller copies pieces that no thread has begun."""
        up_to = 1 + max((self._last.get(name, -1) for name in names), default=-1)
        if self._arrived < up_to:
            self._copy_up_to(up_to)
            with self._changed:
                self._changed.wait_for(lambda: self._arrived >= up_to or self._over())
                if self._arrived < up_to:
                    raise self._error or OSError(errno.ECANCELED, "the load was cancelled")

    def finish(self) -> None:
        self.wait(self._last)

    def cancel(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.wait_for(self._over)

    def missing_tensors(self) -> frozenset[str]:
        return frozenset(name for name, last in self._last.items() if last >= self._arrived)

    def seconds(self) -> float:
        return self._ended_s - self._began_s

    def _over(self) -> bool:
        return not self._running and (self._stopped or self._begun == len(self.pieces))

    def _copy_up_to(self, end: int) -> None:
        while (index := self._next(end)) is not None:
            source, target, nbytes = self.pieces[index]
            failure = None
            try:
                self._store.read(source, self._memory[target : target + nbytes])
                if self._drops_cached:
                    self._store.drop_cached(source, nbytes)
            except OSError as error:
                failure = error
            self._settle(index, failure)

    def _next(self, end: int) -> int | None:
        with self._changed:
            if self._stopped or self._begun >= end:
                return None
            if not self._begun:
                self._began_s = time.perf_counter()
            self._begun += 1
            self._running += 1
            return self._begun - 1

    def _settle(self, index: int, error: OSError | None) -> None:
        with self._changed:
            self._running -= 1
            self._ended_s = time.perf_counter()
            self._done[index] = error is None
            while self._arrived < len(self.pieces) and self._done[self._arrived]:
                self._arrived += 1
            if error is not None:
                self._error, self._stopped = error, True
            self._changed.notify_all()
