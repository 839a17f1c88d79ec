"""The stream that a card computes on: one for each device, made by us, so that others can be given its handle.

torch's default stream has the handle 0, which others (ONNX Runtime) take for "none given". torch has 32 streams of a
device and hands them out in turns; those of another priority are others. So nothing is ever copied on this one.

What a transfer has made ready before it goes over to another store.

Movers bring bytes from the bundle into the arena's memory; one kind for each kind of device, one interface.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from edge_runtime.memory.allocator import Copy, Move
from edge_runtime.memory.memory_format import Layouts
from edge_runtime.memory.store import Store

HIGH = -1
"""The priority: computing goes before whatever else a card does."""


def compute_stream(device: torch.device, cuda: Any = torch.cuda) -> Any:
    """The stream on which engines run and tensors are arranged; `cuda` is torch.cuda, or what stands in for it."""
    return _made(torch.device(device.type, device.index or 0), cuda)


@functools.cache
def _made(device: torch.device, cuda: Any) -> Any:
    return cuda.Stream(device, priority=HIGH)


@contextmanager
def on_compute_stream(device: torch.device, cuda: Any = torch.cuda) -> Iterator[None]:
    """What is queued inside goes to the device's compute stream: after what the caller queued before, and before what
    the caller queues next. Nothing to do on the CPU.
    """
    if device.type == "cpu":
        yield
        return
    stream, before = compute_stream(device, cuda), cuda.current_stream(device)
    if stream == before:
        yield
        return
    stream.wait_stream(before)
    try:
        with cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@dataclass(frozen=True, eq=False)
class StagedBuffer:
    """A way into the other store, and memory (as engines and as the CPU see it) where there is to be other.

    `capacity_bytes` is how much that is; where it is not there yet, contents are lost.
    """

    source: Any
    capacity_bytes: int | None = None
    memory: tuple[Tensor, np.ndarray] | None = None

    @property
    def keeps(self) -> bool:
        """Whether what is in memory can stay."""
        return self.capacity_bytes is None or self.memory is not None


class Transfer(Protocol):
    """Copies on their way, in load order."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors it brings."""
        ...

    @property
    def failed(self) -> bool:
        """Whether bytes could not be read."""
        ...

    def wait(self, names: Iterable[str]) -> None:
        """Return when what the caller starts next may read these tensors; names not of this transfer are there.

        On a GPU the compute stream waits, not the caller. Raises OSError when their bytes could not be read.
        """
        ...

    def finish(self) -> None:
        """Return when every tensor is there; raises OSError when bytes could not be read."""
        ...

    def cancel(self) -> None:
        """Begin no further copy and return when none is under way."""
        ...

    def lost(self) -> frozenset[str]:
        """The tensors that will not arrive, after `cancel` or an OSError."""
        ...

    def seconds(self) -> float:
        """How long the copies have taken, from the first begun to the last done."""
        ...


class TransferBackend(Protocol):
    """The memory of one arena and the way into it.

    `overlaps` says whether it is worth moving weights while a query runs, `reads_file` whether they come out of the
    bundle's file, and not of a copy in memory, `reorders` whether that copy lies as tensors are wanted, so that nothing
    has to be arranged once it has arrived.
    """

    memory: Tensor
    overlaps: bool
    reads_file: bool
    reorders: bool

    def set_layouts(self, layouts: Layouts) -> None:
        """Let tensors arrive in these layouts from now on, where it reorders them; nothing is under way."""
        ...

    def set_memory_limit(self, budget_bytes: int | None) -> None:
        """Let the device refuse this process more than a budget, where it can; None: as much as there is."""
        ...

    def start(self, copies: Sequence[Copy], waits: bool = False) -> Transfer:
        """Begin copies, after those begun before, and return at once; `waits` says that the caller waits for them."""
        ...

    def compact(self, moves: Sequence[Move]) -> None:
        """Move tensors inside the memory, in this order; they are there on return. Nothing else is under way."""
        ...

    def release(self, spans: Iterable[tuple[int, int]]) -> None:
        """Let the system have the memory of these spans (start, end) until they are written again, if it can be had."""
        ...

    def synchronise(self) -> None:
        """Return when the device has done all it was given."""
        ...

    def resize(self, capacity_bytes: int) -> None:
        """Let go of the memory and of what the device keeps for reuse, then take this much; contents are lost."""
        ...

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> StagedBuffer:
        """Make ready to go over to another store, in other memory where a capacity is given, its tensors to arrive in
        these layouts; from any thread.

        Raises RuntimeError or MemoryError when the device has no such memory, OSError when the store cannot be read.
        """
        ...

    def take(self, fresh: StagedBuffer, kept: Sequence[Move]) -> None:
        """Go over to what was made ready. Into other memory these tensors come along, in this order; nothing is under
        way, and no view of the old memory is used any more.
        """
        ...

    def drop(self, fresh: StagedBuffer) -> None:
        """Let go of what was made ready in vain."""
        ...

    def close(self) -> None:
        """End threads and close files."""
        ...


def transfer_backend(device: str | torch.device, store: Store, capacity_bytes: int) -> TransferBackend:
    """The transfer for a device: "cpu", or "cuda" with memory of its own or shared with the CPU (Jetson).

    Raises RuntimeError or MemoryError when the device has no such memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from edge_runtime.memory.transfer_cpu import CpuTransferBackend

        return CpuTransferBackend.stored(store, capacity_bytes)
    if is_integrated(device) and store.file is not None:
        from edge_runtime.memory.transfer_cuda import unified_backend

        return unified_backend(store, capacity_bytes, device)
    from edge_runtime.memory.transfer_cuda import CudaTransferBackend

    return CudaTransferBackend(store, capacity_bytes, device)


def is_integrated(device: torch.device) -> bool:
    """Whether a card has no memory of its own (Jetson)."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def arrives_reordered(device: str | torch.device) -> bool:
    """Whether weights arrive there as they are wanted, so that those that come and go are arranged for nothing."""
    device = torch.device(device)
    return device.type == "cuda" and not is_integrated(device)
