"""Moves weights into memory that the CPU can write: threads of their own copy piece by piece, in load order."""

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
from edge_runtime.memory.transfer import StagedBuffer

# Small enough that the first layers are there early, large enough that handing pieces out costs nothing.
PIECE_BYTES = 4 * 2**20
# Storage answers several requests at once faster than one after the other. The kernel's copy of a file's pages does not
# saturate the memory: a caller that waits for them and one thread beside it take little more than half as long as one.
COPY_THREADS, READ_THREADS = 1, 2
MADV_DONTNEED = 4


def allocate_memory(capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """Page-aligned RAM as engines and as movers see it: the same bytes."""
    region = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    # Written to, so that the memory is really there and the first loads do not pay for it.
    return memory.zero_(), memory.numpy()


def reserve_memory(capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """The same, of which only what is written takes any room."""
    region = mmap.mmap(-1, max(capacity_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(region, dtype=torch.uint8)[:capacity_bytes]
    return memory, memory.numpy()


class CpuTransferBackend:
    """Threads that fill memory the CPU can write.

    `allocate` takes memory as engines see it (a tensor) and as the CPU does (an array of the same bytes);
    `reader` is what reads into it, `again` makes another for another store; `synchronise` waits for a device that
    shares the memory.
    """

    overlaps = False
    reads_file = True
    reorders = False
    memory: Tensor
    _bytes: np.ndarray

    def __init__(
        self,
        reader: StoreReader,
        capacity_bytes: int,
        threads: int = COPY_THREADS,
        allocate: Callable[[int], tuple[Tensor, np.ndarray]] = allocate_memory,
        synchronise: Callable[[], None] = lambda: None,
        again: Callable[[Store], StoreReader] = CopyReader,
    ) -> None:
        self._reader, self._again = reader, again
        self._allocate, self.synchronise, self._threads = allocate, synchronise, threads
        self.memory, self._bytes = allocate(capacity_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="transfer")

    @classmethod
    def stored(cls, store: Store, capacity_bytes: int) -> CpuTransferBackend:
        """A transfer for the CPU as device: copies out of the store."""
        return cls(CopyReader(store), capacity_bytes)

    def start(self, copies: Sequence[Copy], waits: bool = False) -> CpuTransfer:
        """Begin copies, after those begun before, and return at once.

        A caller that waits copies too, beside the threads, and one piece by itself: waking another takes longer than
        a small load where the cores are busy.
        """
        # Nothing may read what is overwritten now.
        self.synchronise()
        transfer = CpuTransfer(copies, self._reader, self._bytes)
        for _ in range(min(self._threads, transfer.pieces - waits)):
            self._pool.submit(transfer.work)
        return transfer

    def compact(self, moves: Sequence[Move]) -> None:
        """Move tensors inside the memory, in this order, each towards the start."""
        self.synchronise()
        for move in moves:
            # numpy sees that the two overlap and copies as if through a buffer.
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

    def set_layouts(self, layouts: Layouts) -> None:
        """Nothing: tensors arrive as they are stored."""

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        """Nothing: no system counts a process's memory as the budget does."""

    def resize(self, capacity_bytes: int) -> None:
        """Let go of the memory, then take this much; contents are lost."""
        self.memory, self._bytes = torch.empty(0, dtype=torch.uint8), np.empty(0, np.uint8)
        self.memory, self._bytes = self._allocate(capacity_bytes)

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> StagedBuffer:
        """See `Mover.prepare`. Ordinary memory takes room only as it is filled, and is given back as it is left."""
        memory = None
        if capacity_bytes is not None:
            if self._allocate is allocate_memory:
                memory = reserve_memory(capacity_bytes)
            elif capacity_bytes + self.memory.numel() <= budget_bytes:
                memory = self._allocate(capacity_bytes)
        return StagedBuffer(self._again(store), capacity_bytes, memory)

    def take(self, fresh: StagedBuffer, kept: Sequence[Move]) -> None:
        """See `Mover.take`."""
        self.synchronise()
        before, self._reader = self._reader, fresh.source
        before.close()
        if fresh.memory is not None:
            memory, into = fresh.memory
            for move in kept:
                into[move.target : move.target + move.nbytes] = self._bytes[move.source : move.source + move.nbytes]
                self.release(((move.source, move.source + move.nbytes),))
            self.release(((0, self._bytes.size),))  # views of it may live on for a while; nobody reads them
            self.memory, self._bytes = memory, into
        elif fresh.capacity_bytes is not None:
            self.resize(fresh.capacity_bytes)

    def drop(self, fresh: StagedBuffer) -> None:
        """See `Mover.drop`."""
        fresh.source.close()

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
    """Pieces of copies that the transfer's threads work off in order; a tensor is there when all up to its end are."""

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
        self._fault: OSError | None = None
        self._began_s = self._ended_s = 0.0

    @property
    def failed(self) -> bool:
        """Whether bytes could not be read."""
        return self._fault is not None

    def work(self) -> None:
        """Take pieces until none is left; run by the transfer's threads."""
        while (index := self._next(self.pieces)) is not None:
            self._do(index)

    def wait(self, names: Iterable[str]) -> None:
        """Return when these tensors are there; raises OSError when their bytes could not be read.

        The caller copies what nobody has begun yet.
        """
        upto = 1 + max((self._last.get(name, -1) for name in names), default=-1)
        while self._arrived < upto and (index := self._next(upto)) is not None:
            self._do(index)
        if self._arrived >= upto:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._arrived >= upto or self._over())
            if self._arrived < upto:
                raise self._fault or OSError(errno.ECANCELED, "the load was cancelled")

    def finish(self) -> None:
        """Return when every tensor is there; raises OSError when bytes could not be read."""
        self.wait(self._last)

    def cancel(self) -> None:
        """Begin no further piece and return when none is under way."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(self._over)

    def lost(self) -> frozenset[str]:
        """The tensors that will not arrive, once the transfer is over."""
        return frozenset(name for name, last in self._last.items() if last >= self._arrived)

    def seconds(self) -> float:
        """How long the copies have taken, from the first begun to the last done."""
        return self._ended_s - self._began_s

    def _over(self) -> bool:
        return not self._running and (self._stopped or self._begun == self.pieces)

    def _do(self, index: int) -> None:
        piece, fault = self._pieces[index], None
        try:
            self._reader.read(self._memory, piece.target, piece.source, piece.nbytes)
        except OSError as error:
            fault = error
        self._settle(index, fault)

    def _next(self, upto: int) -> int | None:
        with self._changed:
            if self._stopped or self._begun >= upto:
                return None
            if not self._begun:
                self._began_s = time.perf_counter()
            self._begun += 1
            self._running += 1
            return self._begun - 1

    def _settle(self, index: int, fault: OSError | None) -> None:
        with self._changed:
            self._running -= 1
            self._ended_s = time.perf_counter()
            if fault is None:
                self._done[index] = True
                while self._arrived < self.pieces and self._done[self._arrived]:
                    self._arrived += 1
            else:
                self._fault, self._stopped = fault, True
            self._changed.notify_all()
