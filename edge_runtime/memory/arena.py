"""The arena: one preallocated piece of device memory in which tensors of a bundle are made resident."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from edge_runtime.memory.admission import Admission, NoRoomError
from edge_runtime.memory.binding import Bindable
from edge_runtime.memory.layout import Layouts, layouts_of_all
from edge_runtime.memory.loads import Loads
from edge_runtime.memory.movers.base import Mover, mover_for
from edge_runtime.memory.movers.fresh import Fresh
from edge_runtime.memory.placing import ALIGNMENT_BYTES, Move, Placement
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.store import Store
from edge_runtime.memory.views import Views


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
        self.store, self.device, self.layouts = store, torch.device(device), layouts or {}
        self._lying = layouts_of_all(store.kinds, self.layouts)
        self.residency = Residency(capacity_bytes, store.extents, budget_bytes, _sizes(self._lying))
        self.mover = mover or mover_for(device, store, self.residency.capacity_bytes)
        self.mover.lay(self._lying)
        self.mover.limit(budget_bytes)
        self._views = Views(self._lying, self.mover)
        self._loads = Loads(self.mover, self.residency, self._views)
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
            self.mover.slide(admission.moves)
            self.compactions += 1
            self.compacted_bytes += sum(move.nbytes for move in admission.moves)
        if self.residency.exceeds(workspace_bytes):
            self.mover.give_back(self.residency.holes)
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
            admission = self.residency.admit_ahead(wanted, resident)
        except NoRoomError:
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
        return engine.starts_early and self.mover.overlaps

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
        self.mover.synchronise()

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
        self._lying = layouts_of_all(self.store.kinds, self.layouts)
        self._views.reset(self._lying)
        # Until the memory is there nothing fits; should it not come, another try may find some.
        self.residency.resize(0, budget_bytes, _sizes(self._lying))
        self.mover.limit(budget_bytes)
        self.mover.resize(capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.mover.lay(self._lying)
        self.residency.resize(capacity_bytes, budget_bytes, _sizes(self._lying))

    def prepare(self, store: Store, capacity_bytes: int, most_bytes: int, budget_bytes: int, layouts: Layouts) -> Fresh:
        """Make ready to go over to another store, with `capacity_bytes` at least and `most_bytes` at most; from any
        thread. The memory stays where it is as large as that. Raises what `Mover.prepare` raises.
        """
        fits = capacity_bytes <= self.residency.capacity_bytes <= most_bytes
        wanted = None if fits else capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return self.mover.prepare(store, wanted, budget_bytes, layouts_of_all(store.kinds, layouts))

    def take_over(self, fresh: Fresh, store: Store, budget_bytes: int, layouts: Layouts) -> None:
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
        self.store, self.layouts, self._lying = store, layouts, layouts_of_all(store.kinds, layouts)
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
        self.mover.limit(budget_bytes)
        self.mover.take(fresh, moves)
        self.residency.resize(capacity_bytes, budget_bytes, _sizes(self._lying))
        self.residency.adopt(kept)

    def close(self) -> None:
        """Let go of threads and files; the memory goes with the last view."""
        self._loads.cut_short()
        self.mover.close()

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
