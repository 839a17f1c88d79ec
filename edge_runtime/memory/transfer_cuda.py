"""Transfers to a CUDA device: with memory of its own from pinned host memory, on a Jetson straight from storage."""

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
from edge_runtime.memory.memory_format import Layouts, changes_order, reorder
from edge_runtime.memory.store import DirectFileReader, Store
from edge_runtime.memory.transfer import StagedBuffer, TransferBackend
from edge_runtime.memory.transfer_cpu import READ_THREADS, CpuTransferBackend

ALLOCATOR_SLACK_BYTES = 128 * 2**20
"""What torch's allocator may hold beyond what it gives out: it takes 2 or 20 MiB at a time, per stream."""
COPY_BYTES = 8 * 2**20
"""Of one copy: layers start as their copy arrives (0.15 ms on PCIe 5), and each costs the host some 20 us."""
BOUNCE_BYTES = 16 * 2**20
"""Compaction moves bytes through a buffer of this size, since source and target may overlap."""
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use the memory
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CONCURRENT_MANAGED_ACCESS = 89  # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS

log = logging.getLogger("gemel.run")


def set_allocator_limit(nbytes: int | None, device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let torch's allocator give out so many bytes, None: all; beyond that it raises OutOfMemoryError.

    `cuda` is torch.cuda, or a stand-in of tests.
    """
    total = cuda.get_device_properties(device).total_memory
    allowed = total if nbytes is None else min(total, nbytes + ALLOCATOR_SLACK_BYTES)
    cuda.set_per_process_memory_fraction(allowed / total, device.index or 0)  # it takes no "cuda" without an index


class PinnedStore:
    """A copy of a store's data, registered with the driver: torch's own pinned memory would round up to 2^n bytes.

    Where that fails it is ordinary memory, with one warning. `cuda` is torch.cuda, or a stand-in of tests. Raises
    OSError when the store cannot be read.
    """

    def __init__(self, store: Store, device: torch.device, cuda: Any) -> None:
        self._store, self._cuda = store, cuda
        self.bytes = torch.empty(footprint_bytes(store.data.nbytes), dtype=torch.uint8)
        self._reordered: frozenset[tuple[int, tuple[int, ...], torch.dtype]] = frozenset()
        store.read(0, self.bytes[: store.data.nbytes].numpy())
        self._registered = False
        if not self.bytes.nbytes:
            return
        code = int(cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))
        self._registered = not code
        if code:
            log.warning("the bundle's %d bytes could not be pinned: loads will be slower", store.data.nbytes)
            with suppress(RuntimeError):  # the runtime reports a failed call at the next kernel launch, once
                torch.zeros(1, device=device).add_(1)

    def set_layouts(self, layouts: Layouts) -> None:
        """Reorder the tensors; no copy is under way. Names that share stored bytes have one format."""
        kinds, extents = self._store.kinds, self._store.extents
        wanted = frozenset(
            (extents[name].offset, kinds[name][1], kinds[name][0])
            for name in layouts
            if name in kinds and changes_order(kinds[name][1])
        )
        for changed, to_channels_last in ((self._reordered - wanted, False), (wanted - self._reordered, True)):
            for offset, shape, dtype in changed:
                reorder(self.bytes.view(dtype), offset, shape, to_channels_last)
        self._reordered = wanted

    def close(self) -> None:
        """Unregister the memory."""
        if self._registered:
            self._registered = False
            self._cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class CudaTransferBackend(TransferBackend):
    """Copies from pinned host memory on a stream of its own, with an event after every copy.

    The bundle's tensors are kept in pinned memory once (as many bytes of RAM as the bundle has), in the format that
    engines take, so that a load is left to the GPU's copy engine: no thread, no host synchronisation, nothing to
    reorder. The executor synchronises after every run, so what a prefetch overwrites is no longer read. `cuda` is
    torch.cuda, or a stand-in of tests.
    """

    overlaps = True
    reads_file = False
    reorders = True

    def __init__(self, store: Store, capacity_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._budget_bytes: int | None = None
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._stored = PinnedStore(store, device, cuda)

    def set_layouts(self, layouts: Layouts) -> None:
        """See `TransferBackend.set_layouts`: in host memory, once."""
        self._stored.set_layouts(layouts)

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        """See `TransferBackend.set_memory_limit`: by torch's allocator, which raises OutOfMemoryError beyond it."""
        if budget_bytes is not None:
            self._cuda.empty_cache()  # blocks of what was tried before the box serves
        self._limit(budget_bytes)
        self._budget_bytes = budget_bytes

    def start(self, copies: Sequence[Copy], waits: bool = False, beside: bool = False) -> CudaTransfer:
        """Enqueue copies after those begun before, and return at once."""
        if not beside:
            self._wait_for_compute()
        transfer = CudaTransfer(self._cuda, self._stream, self._device)
        stored = self._stored.bytes
        with self._cuda.stream(self._stream):
            for copy in copies:
                first = 0  # of the names that have not arrived yet
                for at in range(0, copy.nbytes, COPY_BYTES):
                    end = min(at + COPY_BYTES, copy.nbytes)
                    source = stored[copy.source + at : copy.source + end]
                    self.memory[copy.target + at : copy.target + end].copy_(source, non_blocking=True)
                    last = first
                    while last < len(copy.ends) and copy.ends[last] <= end:
                        last += 1
                    transfer.record(copy.names[first:last])
                    first = last
        transfer.end()
        return transfer

    def compact(self, moves: Sequence[Move]) -> None:
        """Move tensors piece by piece from the low end, so that nothing unread is overwritten."""
        self._wait_for_compute()
        with self._cuda.stream(self._stream):
            for move in moves:
                for at in range(0, move.nbytes, BOUNCE_BYTES):
                    size = min(BOUNCE_BYTES, move.nbytes - at)
                    piece = self.memory[move.source + at : move.source + at + size].clone()
                    self.memory[move.target + at : move.target + at + size].copy_(piece)
        self._stream.synchronize()

    def synchronise(self) -> None:
        """Return when everything on the compute stream is done; loads may still be under way."""
        self._cuda.current_stream(self._device).synchronize()

    def resize(self, capacity_bytes: int) -> None:
        """See `TransferBackend.resize`."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> StagedBuffer:
        """See `TransferBackend.prepare`; both memories exist together for a moment, where the budget allows it."""
        stored = PinnedStore(store, self._device, self._cuda)
        stored.set_layouts(layouts)
        memory = None
        if capacity_bytes is not None and capacity_bytes + self.memory.numel() <= budget_bytes:
            if self._budget_bytes is not None:
                self._limit(max(budget_bytes, self._budget_bytes))
            try:
                memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device), np.empty(0, np.uint8)
            except BaseException:
                stored.close()
                self._limit(self._budget_bytes)
                raise
        return StagedBuffer(stored, capacity_bytes, memory)

    def take(self, staged: StagedBuffer, kept: Sequence[Move]) -> None:
        """See `TransferBackend.take`."""
        self._cuda.synchronize(self._device)
        before, self._stored = self._stored, staged.source
        before.close()
        if staged.memory is not None:
            memory, _ = staged.memory
            for move in kept:
                memory[move.target : move.target + move.nbytes] = self.memory[move.source : move.source + move.nbytes]
            self.memory = memory
            self._cuda.synchronize(self._device)
            self._cuda.empty_cache()
        elif staged.capacity_bytes is not None:
            self.resize(staged.capacity_bytes)

    def drop(self, staged: StagedBuffer) -> None:
        """See `TransferBackend.drop`."""
        staged.source.close()
        self._limit(self._budget_bytes)

    def close(self) -> None:
        """Unpin the host memory, and lift the limit."""
        self._stored.close()
        self.set_memory_limit(None)

    def _wait_for_compute(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def _limit(self, budget_bytes: int | None) -> None:
        set_allocator_limit(budget_bytes, self._device, self._cuda)


class CudaTransfer:
    """Events on the copy stream, one after every copy; waiting puts the compute stream behind the right one."""

    failed = False

    def __init__(self, cuda: Any, stream: Any, device: torch.device) -> None:
        self._cuda, self._stream, self._device = cuda, stream, device
        self._began = self._timed_event()
        self._ended = self._began
        self._events: list[Any] = []
        self._last: dict[str, int] = {}
        self._waited = -1

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._last)

    def record(self, names: Iterable[str]) -> None:
        """Note that the copies enqueued so far bring these tensors."""
        self._last.update(dict.fromkeys(names, len(self._events)))
        event = self._cuda.Event()
        event.record(self._stream)
        self._events.append(event)

    def end(self) -> None:
        """All copies are enqueued."""
        self._ended = self._timed_event()

    def wait(self, names: Iterable[str]) -> None:
        """Let the compute stream continue when these tensors are there; the caller continues at once."""
        last = max((self._last.get(name, -1) for name in names), default=-1)
        if last > self._waited:
            self._cuda.current_stream(self._device).wait_event(self._events[last])
            self._waited = last

    def finish(self) -> None:
        """Return when every tensor is there."""
        self._ended.synchronize()

    def cancel(self) -> None:
        """Return when nothing is under way; what is enqueued cannot be taken back, so everything arrives."""
        self.finish()

    def missing_tensors(self) -> frozenset[str]:
        return frozenset()

    def seconds(self) -> float:
        """How long the copies have taken; call it after `finish`."""
        return self._began.elapsed_time(self._ended) / 1000

    def _timed_event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class UnifiedTransferBackend(CpuTransferBackend):
    """Reads from storage into memory that CPU and GPU share (Jetson).

    The arena is not torch's memory: its allocator is limited to what the budget leaves beside it.
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
        """See `TransferBackend.set_memory_limit`."""
        self._budget_bytes = budget_bytes
        if budget_bytes is not None:
            self._cuda.empty_cache()
        self._limit()

    def resize(self, capacity_bytes: int) -> None:
        """See `TransferBackend.resize`."""
        super().resize(capacity_bytes)
        self._limit()

    def take(self, staged: StagedBuffer, kept: Sequence[Move]) -> None:
        """See `TransferBackend.take`."""
        super().take(staged, kept)
        self._limit()

    def close(self) -> None:
        """End the threads, close the file and lift the limit."""
        super().close()
        self.set_memory_limit(None)

    def _limit(self) -> None:
        budget = self._budget_bytes
        beside = None if budget is None else max(0, budget - self.memory.numel())
        set_allocator_limit(beside, self._device, self._cuda)


def unified_backend(
    store: Store,
    capacity_bytes: int,
    device: torch.device,
    allocate: Callable[[int], tuple[Tensor, np.ndarray]] | None = None,
    synchronise: Callable[[], None] | None = None,
    concurrent: Callable[[torch.device], bool] | None = None,
    cuda: Any = torch.cuda,
) -> UnifiedTransferBackend:
    """A backend that reads from storage straight into managed memory: no copy through the host, none kept there.

    Where the CPU must not touch managed memory while a kernel runs (concurrentManagedAccess is 0, as on all Tegra up
    to Orin; NVIDIA, "CUDA for Tegra", 3.3.1), loads do not overlap runs. Managed memory is chosen
    over pinned memory because the GPU caches only the former (the same note, 3.1). Never run on a Jetson.
    """
    backend = UnifiedTransferBackend(
        store,
        capacity_bytes,
        device,
        allocate or partial(allocate_managed_memory, device),
        synchronise or partial(torch.cuda.synchronize, device),
        cuda,
    )
    backend.overlaps = (concurrent or has_concurrent_access)(device)
    return backend


def has_concurrent_access(device: torch.device, driver: ctypes.CDLL | None = None) -> bool:
    """Whether the CPU may touch managed memory while a kernel runs; False where the driver gives no answer."""
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
    # Not written to here: a kernel may be running, and on Tegra the CPU faults if it touches the memory then.
    return memory[:capacity_bytes], np.frombuffer(seen, np.uint8)[:capacity_bytes]  # type: ignore[call-overload]
