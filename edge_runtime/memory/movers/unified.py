"""Moves weights on a Jetson, whose CPU and GPU share one memory. Never run on one: tests use ordinary memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.movers.host import READ_THREADS, HostMover
from edge_runtime.memory.movers.readers import FileReader
from edge_runtime.memory.store import Store

_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL: any stream may use the memory


def unified_mover(
    store: Store,
    capacity_bytes: int,
    device: torch.device,
    allocate: Callable[[int], tuple[Tensor, np.ndarray]] | None = None,
    synchronise: Callable[[], None] | None = None,
) -> HostMover:
    """A mover that reads from storage straight into managed memory: no copy through the host, none kept there.

    On Tegra the CPU must not touch managed memory while a kernel runs (concurrentManagedAccess is 0; NVIDIA, "CUDA
    for Tegra", 3.3.1), so the mover waits for the GPU first and loads do not overlap runs. Managed memory is chosen
    over pinned memory because the GPU caches only the former (the same note, 3.1).
    """
    return HostMover(
        partial(FileReader, store),
        capacity_bytes,
        READ_THREADS,
        allocate or partial(managed_memory, device),
        synchronise or partial(torch.cuda.synchronize, device),
        FileReader,
    )


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
        raise RuntimeError(f"CUDA error: the driver gave no {nbytes} bytes of managed memory (code {code})")
    region = _Region(pointer.value, nbytes)
    memory = torch.as_tensor(region, device=device)
    weakref.finalize(region, driver.cuMemFree_v2, ctypes.c_uint64(pointer.value))
    seen = (ctypes.c_ubyte * nbytes).from_address(pointer.value)
    array = np.frombuffer(seen, np.uint8)  # type: ignore[call-overload]
    array[:] = 0
    return memory[:capacity_bytes], array[:capacity_bytes]
