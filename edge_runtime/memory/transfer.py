"""How bytes of a bundle reach the arena's memory: one backend per kind of device, and the stream a GPU computes on."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gemel.edge_runtime.memory.allocator import Copy, Move
from gemel.edge_runtime.memory.store import Layouts, Store

HIGH_PRIORITY = -1
"""Of the compute stream: computing goes before whatever else a GPU does."""


def compute_stream(device: torch.device, cuda: Any = torch.cuda) -> Any:
    """The stream on which engines run and weights are reordered; `cuda` is torch.cuda, or a stand-in of tests.

    It is a stream of its own because ONNX Runtime takes the handle 0 of torch's default stream for "none given". torch
    hands out 32 streams per priority in turn, so with another priority than the copy stream it is never that one.
    """
    return _stream_of(torch.device(device.type, device.index or 0), cuda)


@functools.cache
def _stream_of(device: torch.device, cuda: Any) -> Any:
    return cuda.Stream(device, priority=HIGH_PRIORITY)


@contextmanager
def on_compute_stream(device: torch.device, cuda: Any = torch.cuda) -> Iterator[None]:
    """Queue what is inside on the device's compute stream: after what the caller queued before, and before what the
    caller queues next. Does nothing on the CPU.
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
class StagedStore:
    """What a backend has prepared to take over: the `source` of another store, and the memory's size if it changes."""

    source: Any
    capacity_bytes: int | None = None


class Transfer(Protocol):
    """Copies under way, in load order: `names` are the tensors they bring, `failed` whether bytes could not be read."""

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def failed(self) -> bool: ...

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

    def missing_tensors(self) -> frozenset[str]:
        """The tensors that will not arrive, after `cancel` or an OSError."""
        ...

    def seconds(self) -> float:
        """How long the copies have taken, from the first begun to the last done."""
        ...


class TransferBackend(ABC):
    """The memory of one arena and the way into it.

    `overlaps`: moving weights while a query runs is worth it. `reorders`: bytes come from a copy of the bundle in the
    format that tensors are wanted in, so none is reordered on arrival.
    """

    overlaps = False
    reorders = False
    memory: Tensor

    def set_layouts(self, layouts: Layouts) -> None:  # noqa: B027 (only a backend that reorders needs it)
        """Let tensors arrive in these formats from now on, where the backend reorders; nothing is under way."""

    def set_memory_limit(self, budget_bytes: int | None) -> None:  # noqa: B027 (a CPU has no such limit)
        """Let the device refuse this process more than a budget, where it can; None: no limit."""

    def release(self, spans: Iterable[tuple[int, int]]) -> None:  # noqa: B027 (a GPU's memory is one piece)
        """Give the memory of these spans (start, end) back to the system until they are written again, if possible."""

    @abstractmethod
    def start(self, copies: Sequence[Copy], waits: bool = False, beside: bool = False) -> Transfer:
        """Begin copies, after those begun before, and return at once.

        `waits`: the caller waits for them next. `beside`: what the device was given before reads none of the memory
        that is written, so the copies need not wait for it.
        """

    @abstractmethod
    def compact(self, moves: Sequence[Move]) -> None:
        """Move tensors inside the memory, in this order; done on return. Nothing else is under way."""

    @abstractmethod
    def synchronise(self) -> None:
        """Return when the device has done all it was given."""

    @abstractmethod
    def resize(self, capacity_bytes: int) -> None:
        """Free the memory and what the device keeps for reuse, then take this much; contents are lost."""

    @abstractmethod
    def prepare(self, store: Store, layouts: Layouts) -> Any:
        """The source of another store, for `take` or `drop`; from any thread. Touches no memory that kernels use.

        Raises RuntimeError or MemoryError when the device has no memory for it, OSError when it cannot be read.
        """

    @abstractmethod
    def take(self, source: Any, capacity_bytes: int | None, kept: Sequence[Move]) -> None:
        """Load from this source from now on; into memory of another size `kept` tensors are copied, in this order.

        Without kept tensors the old memory is freed first. Nothing is under way, and no view of it is used any more.
        """

    @abstractmethod
    def drop(self, source: Any) -> None:
        """Free a source that is not needed."""

    @abstractmethod
    def close(self) -> None:
        """End threads and free what is not memory of torch."""


def is_integrated(device: torch.device) -> bool:
    """Whether a GPU has no memory of its own (Jetson)."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def arrives_reordered(device: str | torch.device) -> bool:
    """Whether weights arrive there in the format that is wanted (`TransferBackend.reorders`)."""
    device = torch.device(device)
    return device.type == "cuda" and not is_integrated(device)
