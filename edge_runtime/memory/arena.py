"""What the arena hands tensors to: anything that is bound to views of it before it runs.

Views: resident tensors as PyTorch sees them in the arena's memory, and the order they are put in on arrival.

Loads: what is on its way into the arena; what arrives is counted and put in order, what does not is forgotten.

The arena: one preallocated piece of device memory in which tensors of a bundle are made resident.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from edge_runtime.memory.allocator import ALIGNMENT_BYTES, Admission, Copy, Move, NoSpaceError, Placement
from edge_runtime.memory.memory_format import Layouts, complete_layouts
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.store import Store
from edge_runtime.memory.transfer import StagedBuffer, Transfer, TransferBackend, transfer_backend

TensorOf = Callable[[str], Tensor]
"""Gives a resident tensor by its content name: a view of the arena."""
WaitFor = Callable[[Iterable[str]], None]
"""Returns when what is started next may read the tensors of these names."""


class Bindable(Protocol):
    """What uses tensors of the arena; `starts_early` says whether it may begin before its last ones have arrived."""

    starts_early: bool

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Use the tensors that `tensor_of` gives by content name from now on.

        With `wait`, which only one that starts early is given, they are still arriving: a run calls it with the
        names of a layer's tensors before it starts the layer. Without, all are there.
        """
        ...

    def unbind(self) -> None:
        """Let go of all tensors, so that their memory can be given back; `bind` comes before the next run."""
        ...


# In a cycle of swaps tensors return to a few places each; views of these are kept, since making them takes longer than
# all other bookkeeping of a swap.
VIEWS_PER_TENSOR = 4


class TensorViews:
    """Views of the transfer's memory by name and place; every tensor lies as `layouts` says once it is arranged.

    A transfer that reorders them itself brings them so.
    """

    def __init__(self, layouts: Layouts, transfer: TransferBackend) -> None:
        self._transfer = transfer
        self.reset(layouts)

    def reset(self, layouts: Layouts) -> None:
        """Forget every view; from now on tensors lie as these layouts say."""
        self._layouts = layouts
        here = {} if self._transfer.reorders else layouts
        self._to_arrange = frozenset(name for name, layout in here.items() if layout.arranged)
        self._views: dict[tuple[str, int], Tensor] = {}
        self._whole: dict[torch.dtype, Tensor] = {}
        # What is on its way and has to be arranged when it is there, and where that is: by then residency may have
        # planned to move it on.
        self._as_stored: dict[str, int] = {}

    def tensor(self, name: str, offset: int) -> Tensor:
        """A tensor that lies there; the same object as long as it lies, or returns, at its place."""
        place = name, offset
        view = self._views.get(place)
        if view is not None:
            return view
        layout = self._layouts[name]
        view = layout.view(self._seen_as(layout.dtype), offset)
        if len(self._views) >= VIEWS_PER_TENSOR * len(self._layouts):
            self._views.clear()
        self._views[place] = view
        return view

    def arriving(self, names: frozenset[str], placed: Mapping[str, Placement]) -> None:
        """Note where tensors are on their way to."""
        for name in self._to_arrange & names:
            self._as_stored[name] = placed[name].offset

    def arrived(self, names: Iterable[str]) -> None:
        """Put those of these tensors that have arrived as stored in the order they are wanted in."""
        for name in self._as_stored.keys() & frozenset(names):
            layout = self._layouts[name]
            layout.arrange(self._seen_as(layout.dtype), self._as_stored.pop(name))

    def lost(self, names: Iterable[str]) -> None:
        """Expect these tensors no longer."""
        for name in names:
            self._as_stored.pop(name, None)

    def _seen_as(self, dtype: torch.dtype) -> Tensor:
        """All of the memory as values of this dtype; one for all views, since a swap makes hundreds."""
        if dtype not in self._whole:
            memory = self._transfer.memory
            self._whole[dtype] = memory[: memory.numel() // ALIGNMENT_BYTES * ALIGNMENT_BYTES].view(dtype)
        return self._whole[dtype]


class PendingLoads:
    """Transfers that are not done with, in the order they were begun.

    Counts the stored bytes that arrived (`bytes_moved`) and the seconds that the copies took (`load_s`).
    """

    def __init__(self, transfer: TransferBackend, residency: Residency, views: TensorViews) -> None:
        self._transfer, self.residency, self._views = transfer, residency, views
        self._under_way: list[Transfer] = []
        self.bytes_moved = 0
        self.load_s = 0.0

    @property
    def names(self) -> frozenset[str]:
        """The tensors that may still be on their way."""
        return frozenset().union(*(transfer.names for transfer in self._under_way))

    def begin(self, copies: Sequence[Copy], waits: bool = False) -> None:
        """Begin copies, after those begun before; `waits` says that `finish` comes next."""
        transfer = self._transfer.start(copies, waits)
        self._under_way.append(transfer)
        self._views.arriving(transfer.names, self.residency.placed)

    def arriving(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors may still be on its way."""
        return any(not transfer.names.isdisjoint(names) for transfer in self._under_way)

    def wait(self, names: Iterable[str]) -> None:
        """Return when what is started next may read these tensors; OSError when their bytes could not be read."""
        names = tuple(names)
        for transfer in self._under_way:
            transfer.wait(names)
        self._views.arrived(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Wait for all transfers, or for those that bring any of these names.

        OSError when bytes could not be read: what did not arrive is no longer resident.
        """
        for transfer in list(self._under_way):
            if names is None or not transfer.names.isdisjoint(names):
                try:
                    transfer.finish()
                finally:
                    self._end(transfer)

    def keep_only(self, wanted: Collection[str]) -> None:
        """Cut short what brings anything but these tensors, and what failed, so that it is read again."""
        for transfer in list(self._under_way):
            if transfer.failed or not transfer.names <= frozenset(wanted):
                self._end(transfer)

    def cut_short(self) -> None:
        """Cut short everything."""
        for transfer in list(self._under_way):
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Begin nothing more of a transfer, count what arrived, and forget what did not."""
        transfer.cancel()
        self._under_way.remove(transfer)
        lost = transfer.lost()
        self.load_s += transfer.seconds()
        self.bytes_moved += sum(self.residency.extents[name].nbytes for name in transfer.names - lost)
        self.residency.evict(lost)
        self._views.lost(lost)
        self._views.arrived(transfer.names)


class Arena:
    """Resident tensors in `capacity_bytes` of a device ("cpu" or "cuda"), weights and workspaces in `budget_bytes`.

    Loads are begun with `start` or, for a query whose turn is yet to come, `prefetch`; `finish` waits for them and
    counts them. Tensors named in `layouts` are put in that order once they have arrived, and are seen so; all others
    lie as stored.

    Counts the stored bytes that arrived (`bytes_moved`), loads asked for that moved any (`swaps`), prefetches begun,
    the bytes that compaction moved inside the arena (`compacted_bytes`, apart) and the most bytes resident at once,
    and the seconds that the copies took (`load_s`). Call it from one thread.
    """

    def __init__(
        self,
        store: Store,
        capacity_bytes: int,
        device: str | torch.device = "cpu",
        budget_bytes: int | None = None,
        transfer: TransferBackend | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.store, self.device, self.layouts = store, torch.device(device), layouts or {}
        self._lying = complete_layouts(store.kinds, self.layouts)
        self.residency = Residency(capacity_bytes, store.extents, budget_bytes, _sizes(self._lying))
        self.transfer = transfer or transfer_backend(device, store, self.residency.capacity_bytes)
        self.transfer.set_layouts(self._lying)
        self.transfer.set_memory_limit(budget_bytes)
        self._views = TensorViews(self._lying, self.transfer)
        self._loads = PendingLoads(self.transfer, self.residency, self._views)
        self._bound: dict[Bindable, int] = {}
        # Counts the times that anything was given a place.
        self._placed = 0
        self.swaps = self.prefetches = self.compactions = self.compacted_bytes = self.max_resident_bytes = 0

    @property
    def bytes_moved(self) -> int:
        """The stored bytes that arrived so far."""
        return self._loads.bytes_moved

    @property
    def load_s(self) -> float:
        """The seconds that copies took so far."""
        return self._loads.load_s

    def change(self, evict: Collection[str], load: Sequence[str]) -> int:
        """Forget the tensors of `evict`, then bring in those of `load`; returns the bytes moved once they are there."""
        before = self.bytes_moved
        self.start(load, evict=evict, waits=True)
        self.finish()
        return self.bytes_moved - before

    def start(
        self, names: Iterable[str], workspace_bytes: int = 0, evict: Collection[str] = (), waits: bool = False
    ) -> bool:
        """Begin to make these tensors resident, with room for a workspace; whether anything has to be moved.

        `evict` goes first, as far as it is resident. A prefetch of anything else is cut short. What is resident
        stays where it is, unless no hole is large enough for what is missing. `waits` says that `finish` comes next.
        Raises what `Residency.admit` raises.
        """
        wanted = dict.fromkeys(names)
        self._loads.keep_only(wanted)
        resident = [name for name in evict if name in self.residency]
        admission = self.residency.admit(wanted, workspace_bytes, resident)
        self._placed += bool(admission.copies or admission.moves)
        if admission.moves:
            self.finish()
            self.transfer.compact(admission.moves)
            self.compactions += 1
            self.compacted_bytes += sum(move.nbytes for move in admission.moves)
        if self.residency.exceeds(workspace_bytes):
            self.transfer.release(self.residency.holes)
        self.swaps += bool(admission.copies)
        return self._begin(admission, waits)

    def prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> bool:
        """Begin to load tensors nobody needs yet, beside what runs; False, with nothing done, when there is no room.

        Nothing is moved or cut short for it, and nothing that is held is evicted.
        """
        wanted = dict.fromkeys(names)
        resident = [name for name in evict if name in self.residency]
        under_way = self._loads.names
        if any(self.residency.holds(name) or name in wanted or name in under_way for name in resident):
            return False
        try:
            admission = self.residency.admit_prefetch(wanted, resident)
        except NoSpaceError:
            return False
        self._placed += bool(admission.copies)
        self.prefetches += bool(admission.copies)
        return self._begin(admission)

    def bind(self, engine: Bindable, names: Sequence[str]) -> None:
        """Point an engine at its tensors, which `start` was called for.

        One that starts early may begin before they have arrived, where loads overlap runs; otherwise this waits. Where
        nothing has been placed since the engine was bound, it is left alone. OSError when bytes could not be read.
        """
        if self.starts_early(engine) and self.arriving(names):
            self._bound.pop(engine, None)
            engine.bind(self.tensor, self.wait)
            return
        self.finish(names)
        if self._bound.get(engine) != self._placed:
            engine.bind(self.tensor)
            self._bound[engine] = self._placed

    def unbind(self, engine: Bindable) -> None:
        """Let an engine go of its tensors."""
        self._bound.pop(engine, None)
        engine.unbind()

    def starts_early(self, engine: Bindable) -> bool:
        """Whether a run of this engine may begin before its last tensors are there."""
        return engine.starts_early and self.transfer.overlaps

    def arriving(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors may still be on its way."""
        return self._loads.arriving(names)

    def wait(self, names: Iterable[str]) -> None:
        """Return when what is started next may read these tensors; OSError when their bytes could not be read."""
        self._loads.wait(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Wait for all loads under way, or for those that bring any of these names.

        OSError when bytes could not be read: what did not arrive is no longer resident.
        """
        self._loads.finish(names)

    def tensor(self, name: str) -> Tensor:
        """A resident tensor as a view of the arena; the same object as long as it lies, or returns, at its place."""
        return self._views.tensor(name, self.residency.placement(name).offset)

    def synchronise(self) -> None:
        """Wait until the device has done all it was given; loads may still be under way."""
        self.transfer.synchronise()

    def resize(self, capacity_bytes: int, budget_bytes: int | None, layouts: Layouts | None = None) -> None:
        """Forget everything and go on with this much memory, in other `layouts` where these are given.

        The old memory is only given back if nobody keeps a view: unbind the engines first. ValueError while a query
        runs.
        """
        if any(map(self.residency.holds, self.residency.resident)):
            raise ValueError("an arena cannot be resized while a query runs")
        self._loads.cut_short()
        self._bound.clear()
        if layouts is not None:
            self.layouts = layouts
        self._lying = complete_layouts(self.store.kinds, self.layouts)
        self._views.reset(self._lying)
        # Until the memory is there nothing fits; should it not come, another try may find some.
        self.residency.resize(0, budget_bytes, _sizes(self._lying))
        self.transfer.set_memory_limit(budget_bytes)
        self.transfer.resize(capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.transfer.set_layouts(self._lying)
        self.residency.resize(capacity_bytes, budget_bytes, _sizes(self._lying))

    def prepare(
        self, store: Store, capacity_bytes: int, most_bytes: int, budget_bytes: int, layouts: Layouts
    ) -> StagedBuffer:
        """Make ready to go over to another store, with `capacity_bytes` at least and `most_bytes` at most; from any
        thread. The memory stays where it is as large as that. Raises what `Mover.prepare` raises.
        """
        fits = capacity_bytes <= self.residency.capacity_bytes <= most_bytes
        wanted = None if fits else capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return self.transfer.prepare(store, wanted, budget_bytes, complete_layouts(store.kinds, layouts))

    def take_over(self, fresh: StagedBuffer, store: Store, budget_bytes: int, layouts: Layouts) -> None:
        """Go on with what was made ready: resident tensors that the other store has too, and lie as they are wanted,
        stay. Engines that are bound must not run any more; where there is other memory, unbind them first, so that the
        old is free. ValueError while a query runs.
        """
        if any(map(self.residency.holds, self.residency.resident)):
            raise ValueError("an arena cannot go over to another store while a query runs")
        self._loads.cut_short()
        self._bound.clear()
        self._placed += 1
        before, lay = self.residency, self._lying
        self.store, self.layouts, self._lying = store, layouts, complete_layouts(store.kinds, layouts)
        stay = sorted(
            ((name, at) for name, at in before.placed.items() if fresh.keeps and self._lying.get(name) == lay[name]),
            key=lambda one: one[1].offset,
        )
        if fresh.capacity_bytes is None:
            capacity_bytes, kept, moves = before.capacity_bytes, dict(stay), []
        else:
            capacity_bytes = fresh.capacity_bytes
            kept, moves = _closed_up(stay, capacity_bytes)
        self._views.reset(self._lying)
        # Until the memory is there nothing fits, as in `resize`.
        self.residency = self._loads.residency = Residency(0, store.extents, budget_bytes, _sizes(self._lying))
        self.transfer.set_memory_limit(budget_bytes)
        self.transfer.take(fresh, moves)
        self.residency.resize(capacity_bytes, budget_bytes, _sizes(self._lying))
        self.residency.adopt(kept)

    def close(self) -> None:
        """Let go of threads and files; the memory goes with the last view."""
        self._loads.cut_short()
        self.transfer.close()

    def _begin(self, admission: Admission, waits: bool = False) -> bool:
        """Begin the copies; whether there are any."""
        if admission.copies:
            self._loads.begin(admission.copies, waits)
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        return bool(admission.copies)


def _closed_up(stay: Iterable[tuple[str, Placement]], capacity_bytes: int) -> tuple[dict[str, Placement], list[Move]]:
    """Where tensors go, one behind the other from the start, as many as there is room for."""
    kept, moves, end = {}, [], 0
    for name, at in stay:
        place = Placement(end, at.nbytes)
        if place.end <= capacity_bytes:
            kept[name], end = place, place.end
            moves.append(Move(name, at.offset, place.offset, at.nbytes))
    return kept, moves


def _sizes(layouts: Layouts) -> dict[str, int]:
    return {name: layout.nbytes for name, layout in layouts.items()}
