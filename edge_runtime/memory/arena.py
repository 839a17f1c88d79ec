"""The arena: one preallocated piece of device memory in which tensors of a bundle are made resident."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gemel.edge_runtime.memory.allocator import ALIGNMENT_BYTES, Admission, Extent, Move, NoSpaceError, Residency
from gemel.edge_runtime.memory.binding import Bindable
from gemel.edge_runtime.memory.store import Kinds, Layouts, Store, changes_order, reorder, tensor_view
from gemel.edge_runtime.memory.transfer import StagedStore, Transfer, TransferBackend, is_integrated, on_compute_stream

VIEWS_PER_TENSOR = 4
"""Views that are kept per tensor: in a cycle of swaps a tensor returns to a few places, and making the views takes
longer than all other bookkeeping of a swap."""


class TensorViews:
    """Views of the arena's memory by name and place; reorders tensors on arrival where the transfer does not."""

    def __init__(self, kinds: Kinds, layouts: Layouts, transfer: TransferBackend) -> None:
        self._transfer = transfer
        self.reset(kinds, layouts)

    def reset(self, kinds: Kinds, layouts: Layouts) -> None:
        """Forget every view; from now on the tensors of `layouts` are channels last."""
        self._kinds, self._layouts = kinds, layouts
        here = () if self._transfer.reorders else layouts
        self._to_reorder = frozenset(name for name in here if name in kinds and changes_order(kinds[name][1]))
        self._views: dict[tuple[str, int], Tensor] = {}
        self._memory: dict[torch.dtype, Tensor] = {}
        # Tensors under way that are to be reordered, and where they arrive: residency may have planned a move since.
        self._as_stored: dict[str, int] = {}

    def tensor(self, name: str, offset: int) -> Tensor:
        """The tensor at this place; the same object while it stays at, or returns to, its place."""
        view = self._views.get((name, offset))
        if view is None:
            dtype, shape = self._kinds[name]
            view = tensor_view(self._memory_as(dtype), offset, shape, name in self._layouts)
            if len(self._views) >= VIEWS_PER_TENSOR * len(self._kinds):
                self._views.clear()
            self._views[name, offset] = view
        return view

    def expect(self, names: frozenset[str], placed: Mapping[str, Extent]) -> None:
        """Note where tensors will arrive."""
        self._as_stored.update((name, placed[name].offset) for name in self._to_reorder & names)

    def finish_arrival(self, names: Iterable[str]) -> None:
        """Reorder those of these tensors that have arrived as stored."""
        for name in self._as_stored.keys() & frozenset(names):
            dtype, shape = self._kinds[name]
            reorder(self._memory_as(dtype), self._as_stored.pop(name), shape, to_channels_last=True)

    def forget(self, names: Iterable[str]) -> None:
        """These tensors will not arrive."""
        for name in names:
            self._as_stored.pop(name, None)

    def _memory_as(self, dtype: torch.dtype) -> Tensor:
        """All of the memory as values of this dtype; one for all views, since a swap makes hundreds."""
        if dtype not in self._memory:
            memory = self._transfer.memory
            self._memory[dtype] = memory[: memory.numel() // ALIGNMENT_BYTES * ALIGNMENT_BYTES].view(dtype)
        return self._memory[dtype]


def transfer_backend(device: str | torch.device, store: Store, capacity_bytes: int) -> TransferBackend:
    """The backend of a device: "cpu", or "cuda" with memory of its own or shared with the CPU (Jetson).

    Raises RuntimeError or MemoryError when the device has no such memory.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from gemel.edge_runtime.memory.transfer_cpu import CpuTransferBackend

        return CpuTransferBackend(store, capacity_bytes)
    from gemel.edge_runtime.memory.transfer_cuda import CudaTransferBackend, UnifiedTransferBackend

    if is_integrated(device) and store.file is not None:
        return UnifiedTransferBackend(store, capacity_bytes, device)
    return CudaTransferBackend(store, capacity_bytes, device)


class Arena:
    """Resident tensors in `capacity_bytes` of a device ("cpu" or "cuda"), weights and workspaces in `budget_bytes`.

    Loads are begun with `start` or, for a query whose turn is yet to come, `prefetch`; `finish` waits for them and
    counts them. Tensors named in `layouts` are channels last, all others as stored.

    Counts the stored bytes that arrived (`bytes_moved`), loads that moved any (`swaps`), prefetches begun, the bytes
    that compaction moved inside the arena (`compacted_bytes`), the most bytes resident at once, and the seconds that
    the copies took (`load_s`). Call it from one thread.
    """

    def __init__(
        self,
        store: Store,
        capacity_bytes: int,
        device: str | torch.device = "cpu",
        budget_bytes: int | None = None,
        transfer: TransferBackend | None = None,
        layouts: Layouts = (),
    ) -> None:
        self.store, self.device, self.layouts = store, torch.device(device), layouts
        self.residency = Residency(capacity_bytes, store.extents, budget_bytes)
        self.transfer = transfer or transfer_backend(device, store, self.residency.capacity_bytes)
        self.transfer.set_layouts(layouts)
        self.transfer.set_memory_limit(budget_bytes)
        self._views = TensorViews(store.kinds, layouts, self.transfer)
        self._under_way: list[Transfer] = []
        self._bound: dict[Bindable, int] = {}
        # Counts the times that anything was given a place.
        self._placed = 0
        self.bytes_moved = self.swaps = self.prefetches = 0
        self.compactions = self.compacted_bytes = self.max_resident_bytes = 0
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

        `evict` goes first, as far as it is resident. A prefetch of anything else is cancelled, and what failed is read
        again. What is resident stays where it is, unless no gap is large enough for what is missing. `waits` says that
        `finish` comes next. Raises what `Residency.admit` raises.
        """
        wanted = dict.fromkeys(names)
        for transfer in list(self._under_way):
            if transfer.failed or not transfer.names <= wanted.keys():
                self._end(transfer)
        resident = [name for name in evict if name in self.residency]
        admission = self.residency.admit(wanted, workspace_bytes, resident)
        self._placed += bool(admission.copies or admission.moves)
        if admission.moves:
            self.finish()
            self.transfer.compact(admission.moves)
            self.compactions += 1
            self.compacted_bytes += sum(move.nbytes for move in admission.moves)
        if self.residency.exceeds(workspace_bytes):
            self.transfer.release(self.residency.free)
        self.swaps += bool(admission.copies)
        return self._begin(admission, waits)

    def prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> bool:
        """Begin to load tensors that no query needs yet, beside what runs; False, with nothing done, without room.

        Nothing is moved or cancelled for it, and nothing that is held is evicted. The device has finished what read
        the evicted tensors (`synchronise` after each run).
        """
        wanted = dict.fromkeys(names)
        resident = [name for name in evict if name in self.residency]
        if self.arriving(resident) or any(self.residency.holds(name) or name in wanted for name in resident):
            return False
        try:
            admission = self.residency.admit_prefetch(wanted, resident)
        except NoSpaceError:
            return False
        self._placed += bool(admission.copies)
        self.prefetches += bool(admission.copies)
        return self._begin(admission, beside=True)

    def bind(self, engine: Bindable, names: Sequence[str], own: Mapping[str, str] | None = None) -> None:
        """Point an engine at its tensors, which `start` was called for; `own` names its copies of shared tensors.

        One that starts early may start before they have arrived, where loads overlap runs; otherwise this waits. Where
        nothing has been placed since the engine was bound, it is left alone. OSError when bytes could not be read.
        """
        places = own or {}

        def tensor_of(name: str) -> Tensor:
            return self.tensor(places.get(name, name))

        def wait(wanted: Iterable[str]) -> None:
            self.wait(places.get(name, name) for name in wanted)

        if self.starts_early(engine) and self.arriving(names):
            self._bound.pop(engine, None)
            engine.bind(tensor_of, wait)
            return
        self.finish(names)
        if self._bound.get(engine) != self._placed:
            engine.bind(tensor_of)
            self._bound[engine] = self._placed

    def unbind(self, engine: Bindable) -> None:
        """Let an engine drop its tensors."""
        self._bound.pop(engine, None)
        engine.unbind()

    def starts_early(self, engine: Bindable) -> bool:
        """Whether a run of this engine may start before its last tensors have arrived."""
        return engine.starts_early and self.transfer.overlaps

    def arriving(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors may still be on its way."""
        names = tuple(names)
        return any(not transfer.names.isdisjoint(names) for transfer in self._under_way)

    def wait(self, names: Iterable[str]) -> None:
        """Return when what is started next may read these tensors; OSError when their bytes could not be read."""
        names = tuple(names)
        for transfer in self._under_way:
            transfer.wait(names)
        self._views.finish_arrival(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Wait for all loads under way, or for those that bring any of these names.

        OSError when bytes could not be read: what did not arrive is no longer resident.
        """
        for transfer in list(self._under_way):
            if names is None or not transfer.names.isdisjoint(names):
                try:
                    transfer.finish()
                finally:
                    self._end(transfer)

    def tensor(self, name: str) -> Tensor:
        """A resident tensor as a view of the arena; the same object while it stays at, or returns to, its place."""
        return self._views.tensor(name, self.residency.placed[name].offset)

    @property
    def overlaps(self) -> bool:
        """Whether loads run in parallel with runs."""
        return self.transfer.overlaps

    def computing(self) -> AbstractContextManager[None]:
        """Queue what is inside on the stream that the device computes on."""
        return on_compute_stream(self.device)

    def discard(self, staged: StagedStore) -> None:
        """Free what was prepared and is not needed."""
        self.transfer.drop(staged.source)

    def synchronise(self) -> None:
        """Wait until the device has done all it was given; loads may still be under way."""
        self.transfer.synchronise()

    def resize(self, capacity_bytes: int, budget_bytes: int | None, layouts: Layouts | None = None) -> None:
        """Forget everything and continue with this much memory, in other `layouts` where these are given.

        The old memory is only freed once no view of it is left: unbind the engines first. ValueError while a query
        runs.
        """
        self._forget_transfers()
        self.layouts = self.layouts if layouts is None else layouts
        self._views.reset(self.store.kinds, self.layouts)
        # Until the memory is there nothing fits; should it not come, another attempt may find some.
        self.residency.resize(0, budget_bytes)
        self.transfer.set_memory_limit(budget_bytes)
        self.transfer.resize(capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.transfer.set_layouts(self.layouts)
        self.residency.resize(capacity_bytes, budget_bytes)

    def prepare(self, store: Store, capacity_bytes: int, max_bytes: int, layouts: Layouts) -> StagedStore:
        """Prepare to take over another store, with `capacity_bytes` at least and `max_bytes` at most; from any thread.

        The memory stays as it is where its size is in that range. Raises what `TransferBackend.prepare` raises.
        """
        fits = capacity_bytes <= self.residency.capacity_bytes <= max_bytes
        wanted = None if fits else capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return StagedStore(self.transfer.prepare(store, layouts), wanted)

    def take_over(self, staged: StagedStore, store: Store, budget_bytes: int, layouts: Layouts) -> None:
        """Continue with what was prepared: resident tensors that the other store has too, in the same format, stay.

        Where the memory changes its size, they stay if the old and the new one fit the budget together. Engines that
        are bound must not run any more; where the size changes, unbind them first, so that the old memory is freed.
        ValueError while a query runs.
        """
        self._forget_transfers()
        self._placed += 1
        before, moves = self.residency, list[Move]()
        kept = {
            name: at
            for name, at in before.placed.items()
            if name in store.kinds and (name in layouts) == (name in self.layouts)
        }
        capacity_bytes = before.capacity_bytes
        if staged.capacity_bytes is not None:
            capacity_bytes = staged.capacity_bytes
            both_fit = before.capacity_bytes + capacity_bytes <= budget_bytes
            kept, moves = _pack_to_start(kept if both_fit else {}, capacity_bytes)
        self.store, self.layouts = store, layouts
        self._views.reset(store.kinds, layouts)
        # Until the memory is there nothing fits, as in `resize`.
        self.residency = Residency(0, store.extents, budget_bytes)
        self.transfer.set_memory_limit(budget_bytes)
        self.transfer.take(staged.source, staged.capacity_bytes, moves)
        self.residency.resize(capacity_bytes, budget_bytes, kept)

    def close(self) -> None:
        """End threads; the memory is freed with the last view."""
        for transfer in list(self._under_way):
            self._end(transfer)
        self.transfer.close()

    def _forget_transfers(self) -> None:
        if any(map(self.residency.holds, self.residency.resident)):
            raise ValueError("an arena cannot be resized or take over another store while a query runs")
        for transfer in list(self._under_way):
            self._end(transfer)
        self._bound.clear()

    def _begin(self, admission: Admission, waits: bool = False, beside: bool = False) -> bool:
        """Begin the copies, after those begun before; whether there are any."""
        if admission.copies:
            transfer = self.transfer.start(admission.copies, waits, beside)
            self._under_way.append(transfer)
            self._views.expect(transfer.names, self.residency.placed)
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        return bool(admission.copies)

    def _end(self, transfer: Transfer) -> None:
        """Begin nothing more of a transfer, count what arrived, and forget what did not."""
        transfer.cancel()
        self._under_way.remove(transfer)
        lost = transfer.missing_tensors()
        self.load_s += transfer.seconds()
        self.bytes_moved += sum(self.residency.extents[name].nbytes for name in transfer.names - lost)
        self.residency.evict(lost)
        self._views.forget(lost)
        self._views.finish_arrival(transfer.names)


def _pack_to_start(kept: Mapping[str, Extent], capacity_bytes: int) -> tuple[dict[str, Extent], list[Move]]:
    """Tensors one behind the other from the start, as many as fit, and the moves that bring them there."""
    packed, moves, end = dict[str, Extent](), list[Move](), 0
    for name, at in sorted(kept.items(), key=lambda one: one[1].offset):
        place = Extent(end, at.nbytes)
        if place.end <= capacity_bytes:
            packed[name], end = place, place.end
            moves.append(Move(name, at.offset, place.offset, at.nbytes))
    return packed, moves
