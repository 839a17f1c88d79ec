"""Moves weights to a CUDA device with memory of its own. Never run on one so far: tests stand in for the streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.copies import Copy
from edge_runtime.memory.layout import Layouts
from edge_runtime.memory.movers.allowing import allow
from edge_runtime.memory.movers.fresh import Fresh
from edge_runtime.memory.movers.host import PIECE_BYTES
from edge_runtime.memory.movers.pinned import Pinned
from edge_runtime.memory.placing import Move
from edge_runtime.memory.store import Store

# Compaction moves bytes through a buffer of this size, since source and target may overlap.
BOUNCE_BYTES = 16 * 2**20


class CudaMover:
    """Copies from pinned host memory on a stream of its own, with an event after every piece.

    The bundle's tensors are kept in pinned memory once (as many bytes of RAM as the bundle has), in the order in which
    engines want them, so that a load is left to the card's copy engine: no thread of ours, no host synchronisation,
    nothing to arrange. What the compute stream was given before is done before memory is written: the upload of the
    frames whose run a prefetch goes beside, too. The executor synchronises after every run, so what is overwritten is
    no longer read. `cuda` is torch.cuda; tests pass one that keeps a record.
    """

    overlaps = True
    reads_file = False
    arranges = True
    memory: Tensor

    def __init__(self, store: Store, capacity_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._budget_bytes: int | None = None
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._stored = Pinned(store, device, cuda)

    def lay(self, layouts: Layouts) -> None:
        """See `Mover.lay`: in host memory, once."""
        self._stored.lay(layouts)

    def limit(self, budget_bytes: int | None) -> None:
        """See `Mover.limit`: by torch's allocator, which frees what it kept, now and where it comes to the limit, and
        raises OutOfMemoryError where that does not suffice."""
        if budget_bytes is not None:
            self._cuda.empty_cache()  # what was tried out before the box serves lies there
        self._allow(budget_bytes)
        self._budget_bytes = budget_bytes

    def start(self, copies: Sequence[Copy], waits: bool = False) -> CudaTransfer:
        """Enqueue copies after those begun before, and return at once."""
        self._after_compute()
        transfer = CudaTransfer(self._cuda, self._stream, self._device)
        stored = self._stored.bytes
        with self._cuda.stream(self._stream):
            for copy in copies:
                for at in range(0, copy.nbytes, PIECE_BYTES):
                    size = min(PIECE_BYTES, copy.nbytes - at)
                    source, target = copy.source + at, copy.target + at
                    self.memory[target : target + size].copy_(stored[source : source + size], non_blocking=True)
                    ended = [name for name, end in zip(copy.names, copy.ends) if at < end <= at + size]
                    transfer.record(ended)
        return transfer

    def slide(self, moves: Sequence[Move]) -> None:
        """Move tensors inside the memory piece by piece from the low end, so that nothing unread is overwritten."""
        self._after_compute()
        with self._cuda.stream(self._stream):
            for move in moves:
                for at in range(0, move.nbytes, BOUNCE_BYTES):
                    size = min(BOUNCE_BYTES, move.nbytes - at)
                    piece = self.memory[move.source + at : move.source + at + size].clone()
                    self.memory[move.target + at : move.target + at + size].copy_(piece)
        self._stream.synchronize()

    def synchronise(self) -> None:
        """Return when everything running on the compute stream is done; loads may still be under way."""
        self._cuda.current_stream(self._device).synchronize()

    def give_back(self, spans: Iterable[tuple[int, int]]) -> None:
        """Nothing: the memory is one piece of the device's."""

    def resize(self, capacity_bytes: int) -> None:
        """Give the memory and torch's cached blocks back to the device, then take this much; contents are lost."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> Fresh:
        """See `Mover.prepare`; both memories lie beside each other for a moment, if the budget has room for that."""
        stored = Pinned(store, self._device, self._cuda)
        stored.lay(layouts)
        memory = None
        if capacity_bytes is not None and capacity_bytes + self.memory.numel() <= budget_bytes:
            if self._budget_bytes is not None:
                self._allow(max(budget_bytes, self._budget_bytes))
            try:
                memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device), np.empty(0, np.uint8)
            except BaseException:
                stored.close()
                self._allow(self._budget_bytes)
                raise
        return Fresh(stored, capacity_bytes, memory)

    def take(self, fresh: Fresh, kept: Sequence[Move]) -> None:
        """See `Mover.take`."""
        self._cuda.synchronize(self._device)
        before, self._stored = self._stored, fresh.source
        before.close()
        if fresh.memory is not None:
            memory, _ = fresh.memory
            for move in kept:
                memory[move.target : move.target + move.nbytes] = self.memory[move.source : move.source + move.nbytes]
            self.memory = memory
            self._cuda.synchronize(self._device)
            self._cuda.empty_cache()
        elif fresh.capacity_bytes is not None:
            self.resize(fresh.capacity_bytes)

    def drop(self, fresh: Fresh) -> None:
        """See `Mover.drop`."""
        fresh.source.close()
        self._allow(self._budget_bytes)

    def close(self) -> None:
        """Unpin the host memory, and lift the limit."""
        self._stored.close()
        self.limit(None)

    def _after_compute(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def _allow(self, budget_bytes: int | None) -> None:
        allow(budget_bytes, self._device, self._cuda)


class CudaTransfer:
    """Events on the copy stream, one after every piece; waiting puts the compute stream behind the right one."""

    failed = False

    def __init__(self, cuda: Any, stream: Any, device: torch.device) -> None:
        self._cuda, self._stream, self._device = cuda, stream, device
        self._began = cuda.Event(enable_timing=True)
        self._began.record(stream)
        self._events: list[Any] = []
        self._last: dict[str, int] = {}
        self._waited = -1

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._last)

    def record(self, names: Iterable[str]) -> None:
        """Note that the copies enqueued so far bring these tensors."""
        self._last.update(dict.fromkeys(names, len(self._events)))
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def wait(self, names: Iterable[str]) -> None:
        """Let the compute stream go on when these tensors are there; the caller goes on at once."""
        last = max((self._last.get(name, -1) for name in names), default=-1)
        if last > self._waited:
            self._cuda.current_stream(self._device).wait_event(self._events[last])
            self._waited = last

    def finish(self) -> None:
        """Return when every tensor is there."""
        if self._events:
            self._events[-1].synchronize()

    def cancel(self) -> None:
        """Return when nothing is under way; what is enqueued cannot be taken back, so everything arrives."""
        self.finish()

    def lost(self) -> frozenset[str]:
        return frozenset()

    def seconds(self) -> float:
        """How long the copies have taken; call it after `finish`."""
        return self._began.elapsed_time(self._events[-1]) / 1000 if self._events else 0.0
