"""Moves weights on a Jetson, whose CPU and GPU share one memory. Never run on one: tests use ordinary memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.movers.allowing import allow
from edge_runtime.memory.movers.fresh import Fresh
from edge_runtime.memory.movers.host import READ_THREADS, HostMover
from edge_runtime.memory.movers.readers import FileReader
from edge_runtime.memory.placing import Move
from edge_runtime.memory.store import Store

_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use the memory
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_CONCURRENT_MANAGED_ACCESS = 89  # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS


class UnifiedMover(HostMover):
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
        super().__init__(FileReader(store), capacity_bytes, READ_THREADS, allocate, synchronise, FileReader)
        self._device, self._cuda = device, cuda
        self._budget_bytes: int | None = None

    def limit(self, budget_bytes: int | None) -> None:
        """See `Mover.limit`."""
        self._budget_bytes = budget_bytes
        if budget_bytes is not None:
            self._cuda.empty_cache()
        self._allow()

    def resize(self, capacity_bytes: int) -> None:
        """See `Mover.resize`."""
        super().resize(capacity_bytes)
        self._allow()

    def take(self, fresh: Fresh, kept: Sequence[Move]) -> None:
        """See `Mover.take`."""
        super().take(fresh, kept)
        self._allow()

    def close(self) -> None:
        """End the threads, close the file and lift the limit."""
        super().close()
        self.limit(None)

    def _allow(self) -> None:
        budget = self._budget_bytes
        allow(None if budget is None else max(0, budget - self.memory.numel()), self._device, self._cuda)


def unified_mover(
    store: Store,
    capacity_bytes: int,
    device: torch.device,
    allocate: Callable[[int], tuple[Tensor, np.ndarray]] | None = None,
    synchronise: Callable[[], None] | None = None,
    concurrent: Callable[[torch.device], bool] | None = None,
    cuda: Any = torch.cuda,
) -> UnifiedMover:
    """A mover that reads from storage straight into managed memory: no copy through the host, none kept there.

    Where the CPU must not touch managed memory while a kernel runs (concurrentManagedAccess is 0, as on all Tegra up
    to Orin; NVIDIA, "CUDA for Tegra", 3.3.1), loads do not overlap runs; the driver is asked. Either way the mover
    waits for the GPU before it writes. Managed memory is chosen over pinned memory because the GPU caches only the
    former (the same note, 3.1).
    """
    mover = UnifiedMover(
        store,
        capacity_bytes,
        device,
        allocate or partial(managed_memory, device),
        synchronise or partial(torch.cuda.synchronize, device),
        cuda,
    )
    mover.overlaps = (concurrent or concurrent_access)(device)
    return mover


def concurrent_access(device: torch.device, driver: ctypes.CDLL | None = None) -> bool:
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


def managed_memory(device: torch.device, capacity_bytes: int) -> tuple[Tensor, np.ndarray]:
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
