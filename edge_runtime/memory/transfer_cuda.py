"""Transfers to a CUDA device: with memory of its own from pinned host memory, on a Jetson straight from storage."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemel.edge_runtime.memory.allocator import Copy, Move, footprint_bytes
from gemel.edge_runtime.memory.store import Layouts, Store, changes_order, reorder
from gemel.edge_runtime.memory.transfer import TransferBackend
from gemel.edge_runtime.memory.transfer_cpu import CpuTransferBackend

ALLOCATOR_SLACK_BYTES = 128 * 2**20
"""What torch's allocator may hold beyond what it gives out: it takes 2 or 20 MiB at a time, per stream."""
COPY_BYTES = 8 * 2**20
"""Of one copy: layers start as their copy arrives (0.15 ms on PCIe 5), and each costs the host some 20 us."""
BOUNCE_BYTES = 16 * 2**20
"""Compaction moves bytes through a buffer of this size, since source and target may overlap."""
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use the memory
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

log = logging.getLogger("gemel.run")


def set_allocator_limit(nbytes: int | None, device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let torch's allocator give out so many bytes, None: all; beyond that it raises OutOfMemoryError.

    Its cached blocks are freed first. `cuda` is torch.cuda, or a stand-in of tests.
    """
    total, allowed = cuda.get_device_properties(device).total_memory, 1.0
    if nbytes is not None:
        cuda.empty_cache()  # blocks of what was tried before the box serves
        allowed = min(1.0, (nbytes + ALLOCATOR_SLACK_BYTES) / total)
    cuda.set_per_process_memory_fraction(allowed, device.index or 0)  # it takes no "cuda" without an index


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
    reorders = True

    def __init__(self, store: Store, capacity_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._stored = PinnedStore(store, device, cuda)

    def set_layouts(self, layouts: Layouts) -> None:
        """See `TransferBackend.set_layouts`: in host memory, once."""
        self._stored.set_layouts(layouts)

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        """See `TransferBackend.set_memory_limit`: by torch's allocator, which raises OutOfMemoryError beyond it."""
        set_allocator_limit(budget_bytes, self._device, self._cuda)

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
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self.memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)

    def prepare(self, store: Store, layouts: Layouts) -> PinnedStore:
        """See `TransferBackend.prepare`: the other bundle in pinned memory beside the present one."""
        stored = PinnedStore(store, self._device, self._cuda)
        stored.set_layouts(layouts)
        return stored

    def take(self, source: PinnedStore, capacity_bytes: int | None, kept: Sequence[Move]) -> None:
        self._cuda.synchronize(self._device)
        before, self._stored = self._stored, source
        before.close()
        if capacity_bytes is None:
            return
        if not kept:
            self.resize(capacity_bytes)
            return
        memory = torch.empty(capacity_bytes, dtype=torch.uint8, device=self._device)
        for move in kept:
            memory[move.target : move.target + move.nbytes] = self.memory[move.source : move.source + move.nbytes]
        self.memory = memory
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()

    def drop(self, source: PinnedStore) -> None:
        source.close()

    def close(self) -> None:
        """Unpin the host memory, and lift the limit."""
        self._stored.close()
        self.set_memory_limit(None)

    def _wait_for_compute(self) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))


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
    """Reads from storage into memory that CPU and GPU share (Jetson): no copy through the host, none kept there.

    On Tegra up to Orin the CPU must not touch managed memory while a kernel runs (NVIDIA, "CUDA for Tegra", 3.3.1), so
    loads do not overlap runs. It is managed and not pinned memory because the GPU caches only the former (3.1). It is
    not torch's memory: torch's allocator is limited to what the budget leaves beside it. Never run on a Jetson. `cuda`
    is torch.cuda, or a stand-in of tests.
    """

    threads = 2  # storage answers several requests at once faster than one after the other
    drops_cached = True

    def __init__(self, store: Store, capacity_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._budget_bytes: int | None = None
        super().__init__(store, capacity_bytes)

    def release(self, spans: Iterable[tuple[int, int]]) -> None:
        """The driver's memory stays."""

    def synchronise(self) -> None:
        self._cuda.synchronize(self._device)

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        beside = None if budget_bytes is None else max(0, budget_bytes - self.memory.numel())
        set_allocator_limit(beside, self._device, self._cuda)

    def resize(self, capacity_bytes: int) -> None:
        super().resize(capacity_bytes)
        self.set_memory_limit(self._budget_bytes)

    def take(self, source: Store, capacity_bytes: int | None, kept: Sequence[Move]) -> None:
        super().take(source, capacity_bytes, kept)
        self.set_memory_limit(self._budget_bytes)

    def close(self) -> None:
        """End the threads and lift the limit."""
        super().close()
        self.set_memory_limit(None)

    def _allocate(self, capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
        return allocate_managed_memory(self._device, capacity_bytes)


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
