"""Which tensors lie where in the arena: free gaps, placement, compaction and residency, by content name.

Bookkeeping only; `arena.py` moves the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise
from typing import NamedTuple

ALIGNMENT_BYTES = 512


def footprint_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` occupies when resident: its bytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class NoSpaceError(MemoryError):
    """What is needed does not fit beside what stays."""


class BlockedError(NoSpaceError):
    """What is needed fits by its bytes, but the tensors of a running query leave no gap that is large enough."""


class Extent(NamedTuple):
    """Where a tensor lies in the arena or in the bundle's data: `nbytes` from `offset` on, a multiple of 512."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + footprint_bytes(self.nbytes)


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor moved inside the arena by compaction, towards its start; the two ranges may overlap."""

    name: str
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Tensors that are contiguous in the bundle and in the arena, copied at once, the padding between them included.

    `ends` says how many bytes of the copy must have arrived for each of the `names` to be complete.
    """

    source: int
    target: int
    nbytes: int
    names: tuple[str, ...]
    ends: tuple[int, ...]


class FreeList:
    """The free spans (start, end) of an address range, in order, no two of them touching."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = list(spans)

    @classmethod
    def between(cls, placements: Iterable[Extent], capacity_bytes: int) -> FreeList:
        """What the placements leave free below `capacity_bytes`."""
        spans, free = [], 0
        for placed in sorted(placements):
            if free < placed.offset:
                spans.append((free, placed.offset))
            free = max(free, placed.end)
        return cls([*spans, (free, capacity_bytes)] if free < capacity_bytes else spans)

    def add(self, freed: Iterable[tuple[int, int]]) -> None:
        """Enter free spans, merged with those they touch; empty ones are ignored."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.spans, *freed]):
            if merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], end
            elif start < end:
                merged.append((start, end))
        self.spans = merged

    def take(self, size: int) -> int | None:
        """The start of the smallest span of at least `size` bytes, which is taken from it; None if there is none."""
        fitting = [(end - start, index) for index, (start, end) in enumerate(self.spans) if end - start >= size]
        if not fitting:
            return None
        index = min(fitting)[1]
        start, end = self.spans[index]
        self.spans[index : index + 1] = [(start + size, end)] if end - start > size else []
        return start

    def largest(self) -> int:
        """Bytes of the largest span."""
        return max((end - start for start, end in self.spans), default=0)


Run = Sequence[str]
"""Names of tensors that are contiguous in the bundle, in its order, none of them empty."""


def stored_runs(names: Iterable[str], extents: Mapping[str, Extent]) -> list[Run]:
    """Tensors in stored order as runs; empty tensors need no place."""
    runs: list[list[str]] = []
    expected = -1
    for name in names:
        extent = extents[name]
        if not extent.nbytes:
            continue
        if extent.offset != expected:
            runs.append([])
        runs[-1].append(name)
        expected = extent.end
    return list(runs)


def place_runs(free: FreeList, runs: Iterable[Run], footprints: Mapping[str, int]) -> list[tuple[int, Run]] | None:
    """Runs, or parts of them, with the offset of each, taken from `free`; None when a tensor fits nowhere.

    The longest run goes first, whole into the smallest span that it fits; one that fits none is split where the largest
    span would be full, because a copy more costs microseconds and a compaction moves megabytes. Where one span has room
    for everything it always succeeds: what is placed elsewhere leaves only more of that span.
    """
    order = count()
    waiting = [(-sum(map(footprints.__getitem__, run)), next(order), run) for run in runs]
    heapify(waiting)
    placed: list[tuple[int, Run]] = []
    while waiting:
        negative, _, run = heappop(waiting)
        start = free.take(-negative)
        if start is not None:
            placed.append((start, run))
            continue
        largest = free.largest()
        fitting = sum(end <= largest for end in accumulate(map(footprints.__getitem__, run)))
        if not fitting:
            return None
        for part in (run[:fitting], run[fitting:]):
            heappush(waiting, (-sum(map(footprints.__getitem__, part)), next(order), part))
    return placed


def plan_compaction(
    placed: Mapping[str, Extent], held: Collection[str], capacity_bytes: int, need_bytes: int
) -> tuple[Move, ...]:
    """The moves that make one gap of `need_bytes` by moving the fewest bytes; in this order, towards the start.

    Neighbours that are not held move together until the free bytes around them are enough. Where no such neighbours
    exist, everything that is not held moves.
    """
    names = sorted((name for name, one in placed.items() if one.nbytes), key=lambda name: placed[name].offset)
    items = [placed[name] for name in names]
    walls = [-1, *(index for index, name in enumerate(names) if name in held), len(items)]
    movable = [(wall + 1, following) for wall, following in pairwise(walls) if wall + 1 < following]

    def bottom(low: int) -> int:
        return items[low - 1].end if low else 0

    def gap(low: int, high: int, size: int) -> int:
        top = items[high + 1].offset if high + 1 < len(items) else capacity_bytes
        return top - bottom(low) - size

    best: tuple[int, int, int] | None = None
    for first, last in movable:
        low, size = first, 0
        for high in range(first, last):
            size += footprint_bytes(items[high].nbytes)
            while low < high and gap(low + 1, high, size - footprint_bytes(items[low].nbytes)) >= need_bytes:
                size -= footprint_bytes(items[low].nbytes)
                low += 1
            if gap(low, high, size) >= need_bytes and (best is None or size < best[0]):
                best = size, low, high + 1
    moves = []
    for low, high in [best[1:]] if best else movable:
        free = bottom(low)
        for name, one in zip(names[low:high], items[low:high], strict=True):
            if free < one.offset:
                moves.append(Move(name, one.offset, free, one.nbytes))
            free += footprint_bytes(one.nbytes)
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class Admission:
    """What makes tensors resident, in this order: evictions, cancelled prefetches, moves, copies.

    `placed` are the tensors that were missing, and `free` is what is free afterwards; None where nothing is to be done.
    """

    evicted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[Copy, ...] = ()
    placed: Mapping[str, Extent] = field(default_factory=dict)
    free: FreeList | None = None


NOTHING_TO_DO = Admission()


class Residency:
    """Tensors by content name in one address range, at multiples of 512 bytes.

    A tensor is resident once, however many queries need it. Queries `hold` the tensors they run with: these are
    neither evicted nor moved. Prefetched tensors belong to no query until they are admitted or held, and are cancelled
    for whatever is needed. `capacity_bytes` is the size of the range; footprints in it and the workspaces of what runs
    together never exceed `budget_bytes` (the capacity, if none is given). `extents` says where every tensor is stored.
    Eviction only forgets.
    """

    def __init__(self, capacity_bytes: int, extents: Mapping[str, Extent], budget_bytes: int | None = None) -> None:
        self.extents = extents
        self.footprints = {name: footprint_bytes(extent.nbytes) for name, extent in extents.items()}
        self._holds: Counter[str] = Counter()
        self.resize(capacity_bytes, budget_bytes)

    def resize(self, capacity_bytes: int, budget_bytes: int | None, kept: Mapping[str, Extent] | None = None) -> None:
        """Forget everything and start over in a range of this size, in which `kept` tensors already lie."""
        if capacity_bytes < 0:
            raise ValueError(f"an arena cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.budget_bytes = self.capacity_bytes if budget_bytes is None else budget_bytes
        self.placed = dict(kept or {})
        self.resident_bytes, self.workspace_bytes = self._footprint(self.placed), 0
        self._holds.clear()
        self._prefetched: dict[str, None] = {}
        self._free = FreeList.between(self.placed.values(), self.capacity_bytes)

    @property
    def resident(self) -> frozenset[str]:
        """The names of all resident tensors, prefetched ones included."""
        return frozenset(self.placed)

    @property
    def prefetched(self) -> tuple[str, ...]:
        """The tensors that no query has asked for yet, in the order they came."""
        return tuple(self._prefetched)

    @property
    def free(self) -> tuple[tuple[int, int], ...]:
        """The free spans (start, end) of the range."""
        return tuple(self._free.spans)

    def exceeds(self, workspace_bytes: int) -> bool:
        """Whether the whole range, with this workspace and those of what runs already, exceeds the budget."""
        return self.capacity_bytes + self.workspace_bytes + workspace_bytes > self.budget_bytes

    def __contains__(self, name: str) -> bool:
        """Whether a tensor is resident."""
        return name in self.placed

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are not resident, each once, in the order given."""
        return tuple(name for name in dict.fromkeys(names) if name not in self.placed)

    def holds(self, name: str) -> int:
        """How many queries hold a tensor."""
        return self._holds[name]

    def admit(self, names: Iterable[str], workspace_bytes: int = 0, evict: Collection[str] = ()) -> Admission:
        """Forget `evict` and give every one of the names that is not resident a place, all or nothing.

        Afterwards `workspace_bytes` are free beside what runs already. What fits by its bytes succeeds: prefetched
        tensors are cancelled as far as the budget requires, newest first, then tensors that no query holds are moved.
        Raises NoSpaceError when it does not fit by its bytes, BlockedError when held tensors leave no gap, and what
        `evict` raises.
        """
        needed = dict.fromkeys(names)
        self._apply(admission := self._plan(needed, workspace_bytes, evict))
        self._clear_prefetched(needed)
        return admission

    def admit_prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> Admission:
        """The same for tensors that no query needs yet: they count as prefetched, and get only what is free.

        Nothing is cancelled or moved for them: NoSpaceError when they do not fit so.
        """
        needed = dict.fromkeys(names)
        self._check_evictable(evict, needed)
        missing, admission = self._missing_as_stored(needed), NOTHING_TO_DO
        if missing or evict:
            need = self._footprint(missing)
            found = None if self._excess(need, 0, evict) > 0 else self._place_in_gaps(missing, evict, ())
            if found is None:
                raise NoSpaceError(f"no room for {need} bytes beside what stays")
            admission = found
        self._apply(admission)
        self._prefetched.update(dict.fromkeys(admission.placed))
        return admission

    def evict(self, names: Iterable[str]) -> None:
        """Forget tensors, all or none. ValueError when one is held; KeyError when one is not resident."""
        names = tuple(names)
        self._check_evictable(names)
        self._free.add(self._spans(names))
        self._forget(names)

    def hold(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Count a query that runs with these tensors and this workspace; they are no longer prefetched.

        KeyError when one is not resident and NoSpaceError when the budget would be exceeded; nothing is counted then.
        """
        names = tuple(names)
        for name in names:
            self.placed[name]
        if self.resident_bytes + self.workspace_bytes + workspace_bytes > self.budget_bytes:
            raise NoSpaceError(f"{workspace_bytes} bytes of workspace pass the budget of {self.budget_bytes}")
        self._holds.update(names)
        self.workspace_bytes += workspace_bytes
        self._clear_prefetched(names)

    def release(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Take back one `hold` of the same names and workspace."""
        self.workspace_bytes -= workspace_bytes
        self._holds.subtract(names)

    def _plan(self, needed: Collection[str], workspace_bytes: int, evict: Collection[str]) -> Admission:
        self._check_evictable(evict, needed)
        missing = self._missing_as_stored(needed)
        if not missing and not evict and self._excess(0, workspace_bytes, ()) <= 0:
            return NOTHING_TO_DO
        need = self._footprint(missing)
        spare = [name for name in reversed(self._prefetched) if name not in needed and name not in evict]
        excess, cancelled = self._excess(need, workspace_bytes, evict), list[str]()
        for name in spare:
            if excess > 0:
                cancelled.append(name)
                excess -= self.footprints[name]
        if excess > 0:
            raise NoSpaceError(
                f"no room for {need} bytes and {workspace_bytes} of workspace: {self.resident_bytes} are resident and "
                f"{self.workspace_bytes} in use, the budget is {self.budget_bytes}, the arena has {self.capacity_bytes}"
            )
        for spared in (cancelled, spare):
            for place in (self._place_in_gaps, self._place_after_compaction):
                if (admission := place(missing, evict, spared)) is not None:
                    return admission
        raise BlockedError(f"{need} bytes fit, but not around the tensors that running queries hold")

    def _check_evictable(self, evict: Iterable[str], needed: Collection[str] = ()) -> None:
        for name in evict:
            if self.holds(name):
                raise ValueError(f"{name} is held by a running query")
            if name in needed:
                raise ValueError(f"{name} is to be evicted and needed")
            self.placed[name]

    def _missing_as_stored(self, needed: Iterable[str]) -> list[str]:
        return sorted(self.missing(needed), key=self.extents.__getitem__)

    def _footprint(self, names: Iterable[str]) -> int:
        return sum(map(self.footprints.__getitem__, names))

    def _spans(self, names: Iterable[str]) -> list[tuple[int, int]]:
        return [(self.placed[name].offset, self.placed[name].end) for name in names]

    def _excess(self, need: int, workspace_bytes: int, gone: Iterable[str]) -> int:
        """Bytes by which the budget or the range is exceeded once `gone` is forgotten and `need` more are resident."""
        resident = self.resident_bytes - self._footprint(gone) + need
        used = resident + self.workspace_bytes + workspace_bytes
        return max(used - self.budget_bytes, resident - self.capacity_bytes)

    def _place_in_gaps(
        self, missing: Sequence[str], evict: Collection[str], cancelled: Collection[str]
    ) -> Admission | None:
        """Places in the present gaps; None when the tensors fit nowhere."""
        free = FreeList(self._free.spans)
        free.add(self._spans((*evict, *cancelled)))
        return self._place(missing, free, Admission(tuple(evict), tuple(cancelled)))

    def _place_after_compaction(
        self, missing: Sequence[str], evict: Collection[str], cancelled: Collection[str]
    ) -> Admission | None:
        """Places in the one gap that moving the fewest bytes makes; None when held tensors prevent it."""
        gone = {*evict, *cancelled}
        stay = {name: placed for name, placed in self.placed.items() if name not in gone}
        held = {name for name in stay if self.holds(name)}
        moves = plan_compaction(stay, held, self.capacity_bytes, self._footprint(missing))
        stay.update((move.name, Extent(move.target, move.nbytes)) for move in moves)
        free = FreeList.between(stay.values(), self.capacity_bytes)
        return self._place(missing, free, Admission(tuple(evict), tuple(cancelled), moves))

    def _place(self, missing: Sequence[str], free: FreeList, change: Admission) -> Admission | None:
        """The change with each placed run as one copy, in stored order."""
        runs = place_runs(free, stored_runs(missing, self.extents), self.footprints)
        if runs is None:
            return None
        placed = {name: Extent(0, 0) for name in missing if not self.extents[name].nbytes}
        copies = []
        for start, run in sorted(runs, key=lambda one: self.extents[one[1][0]].offset):
            source, ends = self.extents[run[0]].offset, []
            for name in run:
                offset, nbytes = self.extents[name]
                placed[name] = Extent(start + offset - source, nbytes)
                ends.append(offset + nbytes - source)
            copies.append(Copy(source, start, ends[-1], tuple(run), tuple(ends)))
        return replace(change, copies=tuple(copies), placed=placed, free=free)

    def _apply(self, admission: Admission) -> None:
        if admission.free is None:
            return
        self._forget((*admission.evicted, *admission.cancelled))
        self._free = admission.free
        self.placed.update((move.name, Extent(move.target, move.nbytes)) for move in admission.moves)
        self.placed.update(admission.placed)
        self.resident_bytes += self._footprint(admission.placed)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.resident_bytes -= self.footprints[name]
            del self.placed[name]
            self._prefetched.pop(name, None)

    def _clear_prefetched(self, names: Iterable[str]) -> None:
        for name in names if self._prefetched else ():
            self._prefetched.pop(name, None)
