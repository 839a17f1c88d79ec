"""Movers bring bytes from the bundle into the arena's memory; one kind for each kind of device, one interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from edge_runtime.memory.copies import Copy
from edge_runtime.memory.layout import Layouts
from edge_runtime.memory.movers.fresh import Fresh
from edge_runtime.memory.placing import Move
from edge_runtime.memory.store import Store


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


class Mover(Protocol):
    """The memory of one arena and the way into it.

    `overlaps` says whether it is worth moving weights while a query runs, `reads_file` whether they come out of the
    bundle's file, and not of a copy in memory, `arranges` whether that copy lies as tensors are wanted, so that nothing
    has to be arranged once it has arrived.
    """

    memory: Tensor
    overlaps: bool
    reads_file: bool
    arranges: bool

    def lay(self, layouts: Layouts) -> None:
        """Let tensors arrive in these layouts from now on, where it arranges them; nothing is under way."""
        ...

    def limit(self, budget_bytes: int | None) -> None:
        """Let the device refuse this process more than a budget, where it can; None: as much as there is."""
        ...

    def start(self, copies: Sequence[Copy], waits: bool = False) -> Transfer:
        """Begin copies, after those begun before, and return at once; `waits` says that the caller waits for them."""
        ...

    def slide(self, moves: Sequence[Move]) -> None:
        """Move tensors inside the memory, in this order; they are there on return. Nothing else is under way."""
        ...

    def give_back(self, spans: Iterable[tuple[int, int]]) -> None:
        """Let the system have the memory of these spans (start, end) until they are written again, if it can be had."""
        ...

    def synchronise(self) -> None:
        """Return when the device has done all it was given."""
        ...

    def resize(self, capacity_bytes: int) -> None:
        """Let go of the memory and of what the device keeps for reuse, then take this much; contents are lost."""
        ...

    def prepare(self, store: Store, capacity_bytes: int | None, budget_bytes: int, layouts: Layouts) -> Fresh:
        """Make ready to go over to another store, in other memory where a capacity is given, its tensors to arrive in
        these layouts; from any thread.

        Raises RuntimeError or MemoryError when the device has no such memory, OSError when the store cannot be read.
        """
        ...

    def take(self, fresh: Fresh, kept: Sequence[Move]) -> None:
        """Go over to what was made ready. Into other memory these tensors come along, in this order; nothing is under
        way, and no view of the old memory is used any more.
        """
        ...

    def drop(self, fresh: Fresh) -> None:
        """Let go of what was made ready in vain."""
        ...

    def close(self) -> None:
        """End threads and close files."""
        ...


def mover_for(device: str | torch.device, store: Store, capacity_bytes: int) -> Mover:
    """The mover for a device: "cpu", or "cuda" with memory of its own or shared with the CPU (Jetson).

    Raises RuntimeError or MemoryError when the device has no such memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from edge_runtime.memory.movers.host import HostMover

        return HostMover.stored(store, capacity_bytes)
    if is_integrated(device) and store.file is not None:
        from edge_runtime.memory.movers.unified import unified_mover

        return unified_mover(store, capacity_bytes, device)
    from edge_runtime.memory.movers.cuda import CudaMover

    return CudaMover(store, capacity_bytes, device)


def is_integrated(device: torch.device) -> bool:
    """Whether a card has no memory of its own (Jetson)."""
    return bool(torch.cuda.get_device_properties(device).is_integrated)


def arranges_ahead(device: str | torch.device) -> bool:
    """Whether weights arrive there as they are wanted, so that those that come and go are arranged for nothing."""
    device = torch.device(device)
    return device.type == "cuda" and not is_integrated(device)
