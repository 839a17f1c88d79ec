"""How much memory of a card torch's allocator may hold; beyond that it raises OutOfMemoryError.

The bundle's bytes in memory that a card copies from by itself, each tensor in the order in which it is wanted.

Moves weights to a CUDA device with memory of its own. Never run on one so far: tests stand in for the streams.

Moves weights on a Jetson, whose CPU and GPU share one memory. Never run on one: tests use ordinary memory.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.allocator import Copy, Move, footprint_bytes
from edge_runtime.memory.memory_format import Layout, Layouts
from edge_runtime.memory.store import DirectFileReader, Store
from edge_runtime.memory.transfer import StagedBuffer
from edge_runtime.memory.transfer_cpu import PIECE_BYTES, READ_THREADS, CpuTransferBackend

ALLOCATOR_SLACK_BYTES = 128 * 2**20
"""What it may hold beyond what it gives out: it takes 2 or 20 MiB at a time, for each stream apart."""


def set_allocator_limit(nbytes: int | None, device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let it give out so many bytes, None: all there are. `cuda` is torch.cuda, or what stands in for it."""
    total = cuda.get_device_properties(device).total_memory
    allowed = total if nbytes is None else min(total, nbytes + ALLOCATOR_SLACK_BYTES)
    cuda.set_per_process_memory_fraction(allowed / total, device.index or 0)  # it takes no "cuda" alone


log = logging.getLogger("gemel.run")


class PinnedStore:
    """A copy of a store's data, registered with the driver: torch's own pinned memory would round up to 2^n bytes.

    Where that fails it is ordinary memory, which is said once. `cuda` is torch.cuda, or what stands in for it. Raises
    OSError when the store cannot be read.
    """

    def __init__(self, store: Store, device: torch.device, cuda: Any) -> None:
        self._store, self._cuda = store, cuda
        self.bytes = torch.empty(footprint_bytes(store.data.nbytes), dtype=torch.uint8)
        self._lying: dict[int, Layout] = {}
        store.read(0, self.bytes[: store.data.nbytes].numpy())
        self._registered = False
        if not self.bytes.nbytes:
            return
        code = int(cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))
        self._registered = not code
        if code:
            log.warning("the bundle's %d bytes could not be pinned: loads will be slower", store.data.nbytes)
            _forget_error(device)

    def set_layouts(self, layouts: Layouts) -> None:
        """Put the tensors in these formats; nothing may be copied meanwhile. Those stored once lie in one order."""
        extents = self._store.extents
        wanted = {extents[name].offset: layout for name, layout in layouts.items() if layout.arranged}
        for offset, layout in self._lying.items():
            if wanted.get(offset) != layout:
                layout.restore(self._whole(layout), offset)
        for offset, layout in wanted.items():
            if self._lying.get(offset) != layout:
                layout.arrange(self._whole(layout), offset)
        self._lying = wanted

    def close(self) -> None:
        """Let the driver forget the memory."""
        if self._registered:
            self._registered = False
            self._cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())

    def _whole(self, layout: Layout) -> Tensor:
        return self.bytes.view(layout.dtype)


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the error of a failed call and gives it to whoever launches the next kernel, once."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


# Compaction moves bytes through a buffer of this size, since source and target may overlap.
BOUNCE_BYTES = 16 * 2**20


class CudaTransferBackend:
    """Copies from pinned host memory on a stream of its own, with an event after every piece.

    The bundle's tensors are kept in pinned memory once (as many bytes of RAM as the bundle has), in the order in which
    engines want them, so that a load is left to the card's copy engine: no thread of ours, no host synchronisation,
    nothing to arrange. What the compute stream was given before is done before memory is written: the upload of the
    frames whose run a prefetch goes beside, too. The executor synchronises after every run, so what is overwritten is
    no longer read. `cuda` is torch.cuda; tests pass one that keeps a record.
    """

    overlaps = True
    reads_file = False
    reorders = True
    memory: Tensor

    def __init__(self, store: Store, capacity_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._budget_bytes: int | None = None
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._stored = PinnedStore(store, device, cuda)

    def set_layouts(self, layouts: Layouts) -> None:
        """See `Mover.lay`: in host memory, once."""
        self._stored.set_layouts(layouts)

    def set_memory_limit(self, budget_bytes: int | None) -> None:
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

    def compact(self, moves: Sequence[Move]) -> None:
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

    def release(self, spans: Iterable[tuple[int, int]]) -> None:
        """Nothing: the memory is one piece of the device's."""

    def resize(self, capacity_bytes: int) -> None:
        """Give the memory and torch's cached blocks back to the device, then take this much; contents are lost."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> StagedBuffer:
        """See `Mover.prepare`; both memories lie beside each other for a moment, if the budget has room for that."""
        stored = PinnedStore(store, self._device, self._cuda)
        stored.set_layouts(layouts)
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
        return StagedBuffer(stored, capacity_bytes, memory)

    def take(self, fresh: StagedBuffer, kept: Sequence[Move]) -> None:
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

    def drop(self, fresh: StagedBuffer) -> None:
        """See `Mover.drop`."""
        fresh.source.close()
        self._allow(self._budget_bytes)

    def close(self) -> None:
        """Unpin the host memory, and lift the limit."""
        self._stored.close()
        self.set_memory_limit(None)

    def _after_compute(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def _allow(self, budget_bytes: int | None) -> None:
        set_allocator_limit(budget_bytes, self._device, self._cuda)


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


_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use the memory
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CONCURRENT_MANAGED_ACCESS = 89  # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS


class UnifiedTransferBackend(CpuTransferBackend):
    """Reads from storage into memory that a card computes from, too.

    The arena is no memory of torch's: its allocator is limited to what the budget leaves beside it. `cuda` is
    torch.cuda, or what stands in for it.
    """

    def __init__(
        self,
        store: Store,
        capacity_bytes: int,
        device: torch.device,
        allocate: Callable[[int], tuple[Tensor, np.ndarray]],
        synchronise: Callable[[], None],
        cuda: Any,
    ) -> None:
        super().__init__(DirectFileReader(store), capacity_bytes, READ_THREADS, allocate, synchronise, DirectFileReader)
        self._device, self._cuda = device, cuda
        self._budget_bytes: int | None = None

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        """See `Mover.limit`."""
        self._budget_bytes = budget_bytes
        if budget_bytes is not None:
            self._cuda.empty_cache()
        self._allow()

    def resize(self, capacity_bytes: int) -> None:
        """See `Mover.resize`."""
        super().resize(capacity_bytes)
        self._allow()

    def take(self, fresh: StagedBuffer, kept: Sequence[Move]) -> None:
        """See `Mover.take`."""
        super().take(fresh, kept)
        self._allow()

    def close(self) -> None:
        """End the threads, close the file and lift the limit."""
        super().close()
        self.set_memory_limit(None)

    def _allow(self) -> None:
        budget = self._budget_bytes
        set_allocator_limit(None if budget is None else max(0, budget - self.memory.numel()), self._device, self._cuda)


def unified_backend(
    store: Store,
    capacity_bytes: int,
    device: torch.device,
    allocate: Callable[[int], tuple[Tensor, np.ndarray]] | None = None,
    synchronise: Callable[[], None] | None = None,
    concurrent: Callable[[torch.device], bool] | None = None,
    cuda: Any = torch.cuda,
) -> UnifiedTransferBackend:
    """A transfer that reads from storage straight into managed memory: no copy through the host, none kept there.

    Where the CPU must not touch managed memory while a kernel runs (concurrentManagedAccess is 0, as on all Tegra up
    to Orin; NVIDIA, "CUDA for Tegra", 3.3.1), loads do not overlap runs; the driver is asked. Either way the transfer
    waits for the GPU before it writes. Managed memory is chosen over pinned memory because the GPU caches only the
    former (the same note, 3.1).
    """
    transfer = UnifiedTransferBackend(
        store,
        capacity_bytes,
        device,
        allocate or partial(allocate_managed_memory, device),
        synchronise or partial(torch.cuda.synchronize, device),
        cuda,
    )
    transfer.overlaps = (concurrent or has_concurrent_access)(device)
    return transfer


def has_concurrent_access(device: torch.device, driver: ctypes.CDLL | None = None) -> bool:
    """Whether the CPU may touch managed memory while a kernel runs; not where the driver gives no answer."""
    driver = driver or ctypes.CDLL("libcuda.so.1")
    ordinal, found = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(ordinal), ctypes.c_int(device.index or 0)):
        return False
    code = driver.cuDeviceGetAttribute(ctypes.byref(found), ctypes.c_int(_CONCURRENT_MANAGED_ACCESS), ordinal)
    return not code and bool(found.value)


class _Region:
    """What torch needs to see memory as a CUDA tensor."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def allocate_managed_memory(device: torch.device, capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
    """Memory of the driver that CPU and GPU both address; freed with the tensor. RuntimeError when there is none."""
    torch.empty(1, device=device)  # makes the device's context current in this thread
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    nbytes = max(capacity_bytes, 1)
    code = driver.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(nbytes), ctypes.c_uint(_ATTACH_GLOBAL))
    if code:
        kind = torch.OutOfMemoryError if code == _NO_MEMORY else RuntimeError
        raise kind(f"CUDA error: the driver gave no {nbytes} bytes of managed memory (code {code})")
    region = _Region(pointer.value, nbytes)
    memory = torch.as_tensor(region, device=device)
    weakref.finalize(region, driver.cuMemFree_v2, ctypes.c_uint64(pointer.value))
    seen = (ctypes.c_ubyte * nbytes).from_address(pointer.value)
    # Not written to here: a kernel may be running, and a processor that touches the memory then is ended.
    return memory[:capacity_bytes], np.frombuffer(seen, np.uint8)[:capacity_bytes]  # type: ignore[call-overload]
