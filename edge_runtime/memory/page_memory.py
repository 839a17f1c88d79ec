"""The memory of queries over mapped weights: what is resident are ranges of pages, which the page cache holds.

A load reads pages in, an eviction gives them back to the system. Ranges that several queries read are resident once.
Needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gemel.edge_runtime.memory.allocator import Extent, Residency
from gemel.edge_runtime.memory.binding import Bindable


@dataclass(frozen=True, eq=False)
class PageStore:
    """A mapped file, and its ranges by the names that the schedule has for them; two names may be of one range.

    Engines that hold their weights themselves have no ranges, and need no file.
    """

    weights: Any  # MappedWeights, or None without ranges
    extents: Mapping[str, Extent]


class PageMemory:
    """What of a mapped file is resident, within `budget_bytes` for weights and workspaces.

    It counts what an arena does (`memory.arena.Arena`), and its methods mean the same. Loads are done on return, and
    engines are bound to the mapping for good. Call it from one thread.
    """

    device = "cpu"
    overlaps = False
    prefetches = compactions = compacted_bytes = 0

    def __init__(self, store: PageStore, capacity_bytes: int, budget_bytes: int) -> None:
        self.store = store
        # Places in a range are not used, since each page has its own; what fits by its bytes, fits.
        self.residency = Residency(capacity_bytes, store.extents, budget_bytes)
        self.bytes_moved = self.swaps = self.max_resident_bytes = 0
        self.load_s = 0.0
        if sum(extent.nbytes for extent in store.extents.values()) > capacity_bytes:
            store.weights.give_back(store.extents.values())  # what preparing them left in memory

    def start(
        self, names: Iterable[str], workspace_bytes: int = 0, evict: Collection[str] = (), waits: bool = False
    ) -> bool:
        """Make these ranges resident, with room for a workspace; whether anything was loaded.

        Raises what `Residency.admit` raises, and OSError where the file cannot be read.
        """
        admission = self.residency.admit(names, workspace_bytes, [name for name in evict if name in self.residency])
        self._give_back((*admission.evicted, *admission.cancelled))
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        if not admission.placed:
            return False
        extents = [self.store.extents[name] for name in admission.placed]
        begun = time.perf_counter()
        try:
            self.store.weights.load(extents)
        except OSError:
            self.residency.evict(admission.placed)
            raise
        self.load_s += time.perf_counter() - begun
        self.bytes_moved += sum(extent.nbytes for extent in extents)
        self.swaps += 1
        return True

    def change(self, evict: Collection[str], load: Sequence[str]) -> int:
        """Evict and load; returns the bytes that were loaded."""
        before = self.bytes_moved
        self.start(load, evict=evict)
        return self.bytes_moved - before

    def prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> bool:
        """Nothing: a load beside a run would take its time from it."""
        return False

    def finish(self, names: Collection[str] | None = None) -> None:
        """Nothing is under way."""

    def bind(self, engine: Bindable, names: Sequence[str], own: Mapping[str, str] | None = None) -> None:
        """Nothing to bind."""

    def unbind(self, engine: Bindable) -> None:
        """Nothing to unbind."""

    def starts_early(self, engine: Bindable) -> bool:
        """No run begins before its weights are there."""
        return False

    def synchronise(self) -> None:
        """Runs are over when they return."""

    def computing(self) -> AbstractContextManager[None]:
        """As of an arena; nothing is queued on a processor."""
        return nullcontext()

    def resize(self, capacity_bytes: int, budget_bytes: int) -> None:
        """Give everything back, and go on within another budget."""
        self._evict_all()
        self.residency.resize(capacity_bytes, budget_bytes)

    def prepare(self, store: PageStore, capacity_bytes: int, max_bytes: int, layouts: Collection[str] = ()) -> int:
        """What `take_over` takes: the bytes that may be resident."""
        return capacity_bytes

    def take_over(
        self, capacity_bytes: int, store: PageStore, budget_bytes: int, layouts: Collection[str] = ()
    ) -> None:
        """Go on with another store; ranges of the same file stay as far as they fit."""
        kept: dict[str, Extent] = {}
        end = 0
        if store.weights is self.store.weights:
            for name in self.residency.placed:
                extent = store.extents.get(name)
                if extent is None or extent != self.store.extents[name]:
                    continue
                if end + extent.nbytes <= min(capacity_bytes, budget_bytes):
                    kept[name] = Extent(end, extent.nbytes)
                    end += extent.nbytes
        self._give_back(name for name in self.residency.placed if name not in kept)
        self.store = store
        self.residency = Residency(0, store.extents, budget_bytes)
        self.residency.resize(capacity_bytes, budget_bytes, kept)

    def discard(self, capacity_bytes: int) -> None:
        """Nothing was taken for what was prepared."""

    def close(self) -> None:
        """Give everything back; the mapping goes with its sessions."""
        self._evict_all()

    def _evict_all(self) -> None:
        names = tuple(self.residency.resident)
        self.residency.evict(names)
        self._give_back(names)

    def _give_back(self, names: Iterable[str]) -> None:
        """Give back the pages of evicted ranges, unless one of another name is still resident."""
        gone = frozenset(names)
        ranges = {self.store.extents[name] for name in gone}
        if ranges:
            ranges -= {self.store.extents[name] for name in self.residency.placed if name not in gone}
            self.store.weights.give_back(ranges)


def open_memory(
    store: Any, capacity_bytes: int, device: str, budget_bytes: int | None = None, layouts: Collection[str] = ()
) -> Any:
    """The memory of a store's weights: pages of a mapped file, or an arena (`memory.arena`) of a device.

    Raises RuntimeError or MemoryError when the device has no memory of this size.
    """
    if isinstance(store, PageStore):
        return PageMemory(store, capacity_bytes, capacity_bytes if budget_bytes is None else budget_bytes)
    from gemel.edge_runtime.memory.arena import Arena

    return Arena(store, capacity_bytes, device, budget_bytes, layouts=layouts)
