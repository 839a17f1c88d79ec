"""Transfers into memory that the CPU can write: threads copy piece by piece, in load order."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.allocator import Copy, Move
from edge_runtime.memory.memory_format import Layouts
from edge_runtime.memory.store import CopyReader, Store, StoreReader
from edge_runtime.memory.transfer import StagedBuffer, TransferBackend

PIECE_BYTES = 4 * 2**20
"""Small enough that the first layers arrive early, large enough that handing pieces out costs nothing."""
COPY_THREADS, READ_THREADS = 1, 2
"""Storage answers several requests at once faster than one after the other. Copying a file's cached pages does not
saturate the memory: a caller that waits for them and one thread take little more than half as long as one."""
MADV_DONTNEED = 4


def allocate_memory(capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """Page-aligned RAM as a tensor and as an array of the same bytes."""
    region = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    # Written to, so that the pages exist and the first loads do not pay for them.
    return memory.zero_(), memory.numpy()


def reserve_memory(capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """The same, of which only pages that are written take memory."""
    region = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    return memory, memory.numpy()


class CpuTransferBackend(TransferBackend):
    """Threads that fill memory the CPU can write.

    `allocate` gives memory as a tensor and as an array of the same bytes; `reader` reads into it, `make_reader` makes
    one for another store; `synchronise` waits for a device that shares the memory.
    """

    _bytes: np.ndarray

    def __init__(
        self,
        reader: StoreReader,
        capacity_bytes: int,
        threads: int = COPY_THREADS,
        allocate: Callable[[int], tuple[Tensor, np.ndarray]] = allocate_memory,
        synchronise: Callable[[], None] = lambda: None,
        make_reader: Callable[[Store], StoreReader] = CopyReader,
    ) -> None:
        self._reader, self._make_reader = reader, make_reader
        self._allocate, self._synchronise, self._threads = allocate, synchronise, threads
        self.memory, self._bytes = allocate(capacity_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="transfer")

    @classmethod
    def for_store(cls, store: Store, capacity_bytes: int) -> CpuTransferBackend:
        """The backend of the CPU: copies out of the store."""
        return cls(CopyReader(store), capacity_bytes)

    def start(self, copies: Sequence[Copy], waits: bool = False, beside: bool = False) -> CpuTransfer:
        """See `TransferBackend.start`.

        A caller that waits copies too, and a single piece alone: waking a thread takes longer than a small load where
        the cores are busy.
        """
        if not beside:
            self.synchronise()
        transfer = CpuTransfer(copies, self._reader, self._bytes)
        for _ in range(min(self._threads, transfer.pieces - waits)):
            self._pool.submit(transfer.work)
        return transfer

    def compact(self, moves: Sequence[Move]) -> None:
        """See `TransferBackend.compact`."""
        self.synchronise()
        for move in moves:
            # numpy detects the overlap and copies as if through a buffer.
            source = self._bytes[move.source : move.source + move.nbytes]
            self._bytes[move.target : move.target + move.nbytes] = source

    def release(self, spans: Iterable[tuple[int, int]]) -> None:
        """Whole pages of ordinary memory go back to the system; a driver's memory stays."""
        if self._allocate is not allocate_memory:
            return
        self.synchronise()
        for start, end in spans:
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                ctypes.CDLL(None).madvise(
                    ctypes.c_void_p(self._bytes.ctypes.data + first), ctypes.c_size_t(last - first), MADV_DONTNEED
                )

    def synchronise(self) -> None:
        """See `TransferBackend.synchronise`."""
        self._synchronise()

    def resize(self, capacity_bytes: int) -> None:
        """See `TransferBackend.resize`."""
        self.memory, self._bytes = torch.empty(0, dtype=torch.uint8), np.empty(0, np.uint8)
        self.memory, self._bytes = self._allocate(capacity_bytes)

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> StagedBuffer:
        """See `TransferBackend.prepare`; pages of ordinary memory are taken as they are filled."""
        memory = None
        if capacity_bytes is not None:
            if self._allocate is allocate_memory:
                memory = reserve_memory(capacity_bytes)
            elif capacity_bytes + self.memory.numel() <= budget_bytes:
                memory = self._allocate(capacity_bytes)
        return StagedBuffer(self._make_reader(store), capacity_bytes, memory)

    def take(self, staged: StagedBuffer, kept: Sequence[Move]) -> None:
        """See `TransferBackend.take`."""
        self.synchronise()
        before, self._reader = self._reader, staged.source
        before.close()
        if staged.memory is not None:
            memory, into = staged.memory
            for move in kept:
                into[move.target : move.target + move.nbytes] = self._bytes[move.source : move.source + move.nbytes]
                self.release(((move.source, move.source + move.nbytes),))
            self.release(((0, self._bytes.size),))  # views of it may live on for a while, unread
            self.memory, self._bytes = memory, into
        elif staged.capacity_bytes is not None:
            self.resize(staged.capacity_bytes)

    def drop(self, staged: StagedBuffer) -> None:
        """See `TransferBackend.drop`."""
        staged.source.close()

    def close(self) -> None:
        """End the threads and close the file."""
        self._pool.shutdown()
        self._reader.close()


@dataclass(frozen=True, slots=True)
class _Piece:
    source: int
    target: int
    nbytes: int


class CpuTransfer:
    """Pieces of copies that threads work off in order; a tensor is there when all pieces up to its end are."""

    def __init__(self, copies: Sequence[Copy], reader: StoreReader, memory: np.ndarray) -> None:
        self._reader, self._memory = reader, memory
        self._pieces: list[_Piece] = []
        self._last: dict[str, int] = {}
        for copy in copies:
            first = len(self._pieces)
            self._pieces += [
                _Piece(copy.source + at, copy.target + at, min(PIECE_BYTES, copy.nbytes - at))
                for at in range(0, copy.nbytes, PIECE_BYTES)
            ]
            self._last.update((name, first + (end - 1) // PIECE_BYTES) for name, end in zip(copy.names, copy.ends))
        self.names = frozenset(self._last)
        self.pieces = len(self._pieces)
        self._changed = threading.Condition()
        self._begun = self._running = self._arrived = 0
        self._done = [False] * self.pieces
        self._stopped = False
        self._error: OSError | None = None
        self._began_s = self._ended_s = 0.0

    @property
    def failed(self) -> bool:
        """Whether bytes could not be read."""
        return self._error is not None

    def work(self) -> None:
        """Copy pieces until none is left; run by the backend's threads."""
        while (index := self._next(self.pieces)) is not None:
            self._do(index)

    def wait(self, names: Iterable[str]) -> None:
        """Return when these tensors are there; raises OSError when their bytes could not be read.

        The caller copies pieces that no thread has begun.
        """
        up_to = 1 + max((self._last.get(name, -1) for name in names), default=-1)
        while self._arrived < up_to and (index := self._next(up_to)) is not None:
            self._do(index)
        if self._arrived >= up_to:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._arrived >= up_to or self._over())
            if self._arrived < up_to:
                raise self._error or OSError(errno.ECANCELED, "the load was cancelled")

    def finish(self) -> None:
        """Return when every tensor is there; raises OSError when bytes could not be read."""
        self.wait(self._last)

    def cancel(self) -> None:
        """Begin no further piece and return when none is under way."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(self._over)

    def missing_tensors(self) -> frozenset[str]:
        """The tensors that will not arrive, once the transfer is over."""
        return frozenset(name for name, last in self._last.items() if last >= self._arrived)

    def seconds(self) -> float:
        """How long the copies have taken, from the first begun to the last done."""
        return self._ended_s - self._began_s

    def _over(self) -> bool:
        return not self._running and (self._stopped or self._begun == self.pieces)

    def _do(self, index: int) -> None:
        piece, failure = self._pieces[index], None
        try:
            self._reader.read(self._memory, piece.target, piece.source, piece.nbytes)
        except OSError as error:
            failure = error
        self._settle(index, failure)

    def _next(self, up_to: int) -> int | None:
        with self._changed:
            if self._stopped or self._begun >= up_to:
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
            if error is None:
                self._done[index] = True
                while self._arrived < self.pieces and self._done[self._arrived]:
                    self._arrived += 1
            else:
                self._error, self._stopped = error, True
            self._changed.notify_all()
