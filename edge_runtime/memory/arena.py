"""The arena: one preallocated piece of device memory in which tensors of a bundle are made resident."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from edge_runtime.memory.binding import Bindable
from edge_runtime.memory.layout import Layout, Layouts
from edge_runtime.memory.movers.base import Mover, Transfer, mover_for
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.store import Store

# In a cycle of swaps tensors return to a few places each; views of these are kept, since making them takes longer than
# all other bookkeeping of a swap.
VIEWS_PER_TENSOR = 4


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
        mover: Mover | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        self.store, self.device = store, torch.device(device)
        self._lay_out(layouts or {})
        self.residency = Residency(capacity_bytes, store.extents, budget_bytes, self._sizes)
        self.mover = mover or mover_for(device, store, self.residency.capacity_bytes)
        self._views: dict[tuple[str, int], Tensor] = {}
        self._whole: dict[torch.dtype, Tensor] = {}
        # What is on its way and has to be arranged when it is there, and where that is: by then residency may have
        # planned to move it on.
        self._as_stored: dict[str, int] = {}
        self._under_way: list[Transfer] = []
        self._bound: dict[Bindable, int] = {}
        # Counts the times that anything was given a place.
        self._placed = 0
        self.bytes_moved = self.swaps = self.prefetches = self.compactions = self.compacted_bytes = 0
        self.max_resident_bytes = 0
        self.load_s = 0.0

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
        self._settle(wanted)
        resident = [name for name in evict if name in self.residency]
        admission = self.residency.admit(wanted, workspace_bytes, resident)
        assert admission is not None
        self._placed += bool(admission.copies or admission.moves)
        if admission.moves:
            self.finish()
            self.mover.slide(admission.moves)
            self.compactions += 1
            self.compacted_bytes += sum(move.nbytes for move in admission.moves)
        if self.residency.exceeds(workspace_bytes):
            self.mover.give_back(self.residency.holes)
        if admission.copies:
            self.swaps += 1
            self._follow(self.mover.start(admission.copies, waits))
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        return bool(admission.copies)

    def prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> bool:
        """Begin to load tensors nobody needs yet, beside what runs; False, with nothing done, when there is no room.

        Nothing is moved or cut short for it, and nothing that is held is evicted.
        """
        wanted = dict.fromkeys(names)
        resident = [name for name in evict if name in self.residency]
        under_way = frozenset().union(*(transfer.names for transfer in self._under_way))
        if any(self.residency.holds(name) or name in wanted or name in under_way for name in resident):
            return False
        admission = self.residency.admit(wanted, 0, resident, ahead=True)
        if admission is None:
            return False
        self._placed += bool(admission.copies)
        if admission.copies:
            self.prefetches += 1
            self._follow(self.mover.start(admission.copies))
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        return bool(admission.copies)

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
        return engine.starts_early and self.mover.overlaps

    def arriving(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors may still be on its way."""
        return any(not transfer.names.isdisjoint(names) for transfer in self._under_way)

    def wait(self, names: Iterable[str]) -> None:
        """Return when what is started next may read these tensors; OSError when their bytes could not be read."""
        names = tuple(names)
        for transfer in self._under_way:
            transfer.wait(names)
        self._arrange(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Wait for all loads under way, or for those that bring any of these names.

        OSError when bytes could not be read: what did not arrive is no longer resident.
        """
        for transfer in list(self._under_way):
            if names is None or not transfer.names.isdisjoint(names):
                try:
                    transfer.finish()
                finally:
                    self._retire(transfer)

    def tensor(self, name: str) -> Tensor:
        """A resident tensor as a view of the arena; the same object as long as it lies, or returns, at its place."""
        place = name, self.residency.placement(name).offset
        view = self._views.get(place)
        if view is not None:
            return view
        layout = self._layouts[name]
        view = layout.view(self._seen_as(layout.dtype), place[1])
        if len(self._views) >= VIEWS_PER_TENSOR * len(self.store.extents):
            self._views.clear()
        self._views[place] = view
        return view

    def synchronise(self) -> None:
        """Wait until the device has done all it was given; loads may still be under way."""
        self.mover.synchronise()

    def resize(self, capacity_bytes: int, budget_bytes: int, layouts: Layouts | None = None) -> None:
        """Forget everything and go on with this much memory, in other `layouts` where these are given.

        The old memory is only given back if nobody keeps a view: unbind the engines first. ValueError while a query
        runs.
        """
        if any(map(self.residency.holds, self.residency.resident)):
            raise ValueError("an arena cannot be resized while a query runs")
        for transfer in list(self._under_way):
            self._retire(transfer)
        self._views.clear()
        self._whole.clear()
        self._bound.clear()
        if layouts is not None:
            self._lay_out(layouts)
        # Until the memory is there nothing fits; should it not come, another try may find some.
        self.residency = Residency(0, self.store.extents, budget_bytes, self._sizes)
        resized = Residency(capacity_bytes, self.store.extents, budget_bytes, self._sizes)
        self.mover.resize(resized.capacity_bytes)
        self.residency = resized

    def close(self) -> None:
        """Let go of threads and files; the memory goes with the last view."""
        for transfer in list(self._under_way):
            self._retire(transfer)
        self.mover.close()

    def _lay_out(self, layouts: Layouts) -> None:
        stored = {name: Layout(*kind) for name, kind in self.store.kinds.items()}
        self.layouts = layouts
        self._layouts = {**stored, **layouts}
        self._sizes = {name: layout.nbytes for name, layout in self._layouts.items()}
        self._to_arrange = frozenset(name for name, layout in self._layouts.items() if layout.arranged)

    def _seen_as(self, dtype: torch.dtype) -> Tensor:
        """All of the memory as values of this dtype; one for all views, since a swap makes hundreds."""
        if dtype not in self._whole:
            self._whole[dtype] = self.mover.memory[: self.residency.capacity_bytes].view(dtype)
        return self._whole[dtype]

    def _follow(self, transfer: Transfer) -> None:
        self._under_way.append(transfer)
        for name in self._to_arrange & transfer.names:
            self._as_stored[name] = self.residency.placement(name).offset

    def _arrange(self, names: Iterable[str]) -> None:
        """Put those of these tensors that have arrived as stored in the order they are wanted in."""
        for name in self._as_stored.keys() & frozenset(names):
            layout = self._layouts[name]
            layout.arrange(self._seen_as(layout.dtype), self._as_stored.pop(name))

    def _settle(self, wanted: Collection[str]) -> None:
        """Cut short what is under way for others, so that its places can be used and the way is free.

        What failed is forgotten, so that it is read again.
        """
        for transfer in list(self._under_way):
            if transfer.failed or not transfer.names <= frozenset(wanted):
                self._retire(transfer)

    def _retire(self, transfer: Transfer) -> None:
        """Begin nothing more of a transfer, count what arrived, and forget what did not."""
        transfer.cancel()
        self._under_way.remove(transfer)
        lost = transfer.lost()
        self.load_s += transfer.seconds()
        self.bytes_moved += sum(self.store.extents[name].nbytes for name in transfer.names - lost)
        self.residency.evict(lost)
        for name in lost:
            self._as_stored.pop(name, None)
        self._arrange(transfer.names)
