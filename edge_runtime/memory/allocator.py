"""Plan where tensors lie in an address range: free gaps, placement of runs, compaction, and admission.

Pure functions over the present state (`ArenaView`): `Residency` keeps that state, the arena carries plans out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise
from typing import NamedTuple, Protocol

ALIGNMENT_BYTES = 512


def footprint_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` occupies when resident: its bytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class NoSpaceError(MemoryError):
    """What is needed does not fit beside what stays."""


class BlockedError(NoSpaceError):
    """What is needed fits by its bytes, but the tensors of a running query leave no gap that is large enough."""


class Extent(NamedTuple):
    """Where a tensor is stored: `nbytes` from `offset` on in the bundle's data section, at a multiple of 512."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + footprint_bytes(self.nbytes)


class ArenaSpan(NamedTuple):
    """Where a tensor lies in the range: `nbytes` from `offset` on; it occupies `nbytes` rounded up."""

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
    def between(cls, placements: Iterable[ArenaSpan], capacity_bytes: int) -> FreeList:
        """What the placements leave free below `capacity_bytes`."""
        spans, free = [], 0
        for placed in sorted(placements, key=lambda placed: placed.offset):
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
        offset, nbytes = extents[name]
        if not nbytes:
            continue
        if offset != expected:
            runs.append([])
        runs[-1].append(name)
        expected = offset + footprint_bytes(nbytes)
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
    placed: Mapping[str, ArenaSpan], held: Iterable[str], capacity_bytes: int, need_bytes: int
) -> tuple[Move, ...]:
    """The moves that make one gap of `need_bytes` by moving the fewest bytes; in this order, towards the start.

    Neighbours that are not held move together until the free bytes around them are enough. Where no such neighbours
    exist, everything that is not held moves.
    """
    fixed = set(held)
    items = sorted(((name, one) for name, one in placed.items() if one.nbytes), key=lambda item: item[1].offset)
    best: tuple[int, int, int] | None = None
    for first, last in _movable_ranges(items, fixed):
        low, size = first, 0
        for high in range(first, last):
            size += _footprint(items[high][1])
            while low < high:
                smaller = size - _footprint(items[low][1])
                if _span_bytes(items, low + 1, high, capacity_bytes) - smaller < need_bytes:
                    break
                size, low = smaller, low + 1
            gap = _span_bytes(items, low, high, capacity_bytes) - size
            if gap >= need_bytes and (best is None or size < best[0]):
                best = size, low, high + 1
    windows = [best[1:]] if best else _movable_ranges(items, fixed)
    return tuple(move for low, high in windows for move in _moves_to_start(items, low, high))


_Items = list[tuple[str, ArenaSpan]]


def _footprint(placed: ArenaSpan) -> int:
    return placed.end - placed.offset


def _movable_ranges(items: _Items, fixed: set[str]) -> list[tuple[int, int]]:
    """Index ranges of items between fixed ones."""
    walls = [-1, *(index for index, (name, _) in enumerate(items) if name in fixed), len(items)]
    return [(wall + 1, following) for wall, following in pairwise(walls) if wall + 1 < following]


def _span_bytes(items: _Items, low: int, high: int, capacity_bytes: int) -> int:
    """Bytes between the neighbours of items low to high, those items included."""
    return (items[high + 1][1].offset if high + 1 < len(items) else capacity_bytes) - _lower_bound(items, low)


def _lower_bound(items: _Items, low: int) -> int:
    return items[low - 1][1].end if low else 0


def _moves_to_start(items: _Items, low: int, high: int) -> Iterable[Move]:
    free = _lower_bound(items, low)
    for name, placed in items[low:high]:
        if free < placed.offset:
            yield Move(name, placed.offset, free, placed.nbytes)
        free += _footprint(placed)


class ArenaView(Protocol):
    """The state that an admission is planned from (see `Residency`)."""

    @property
    def capacity_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def extents(self) -> Mapping[str, Extent]: ...
    @property
    def footprints(self) -> Mapping[str, int]: ...
    @property
    def placed(self) -> Mapping[str, ArenaSpan]: ...
    @property
    def prefetched(self) -> Sequence[str]: ...
    @property
    def free(self) -> Sequence[tuple[int, int]]: ...
    def holds(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """What makes tensors resident, in this order: evictions, cancelled prefetches, moves, copies.

    `placed` are the tensors that were missing, and `free` is what is free afterwards; None where nothing is to be done.
    """

    evicted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[Copy, ...] = ()
    placed: Mapping[str, ArenaSpan] = field(default_factory=dict)
    free: FreeList | None = None


NOTHING_TO_DO = Admission()


def plan_admission(view: ArenaView, needed: Collection[str], workspace_bytes: int, evict: Collection[str]) -> Admission:
    """How all that is `needed`, each name once, becomes resident with room for a workspace, `evict` forgotten.

    What fits by its bytes succeeds: prefetched tensors are cancelled as far as the budget requires, newest first, then
    tensors that no query holds are moved. Raises NoSpaceError when it does not fit by its bytes, BlockedError when held
    tensors leave no gap, and what `check_evictable` raises.
    """
    check_evictable(view, evict, needed)
    missing = _missing(view, needed)
    if not missing and not evict and _excess_bytes(view, 0, workspace_bytes, ()) <= 0:
        return NOTHING_TO_DO
    gone, need = set(evict), _occupied_bytes(view, missing)
    spare = [name for name in reversed(view.prefetched) if name not in needed and name not in gone]
    cancelled = _pick_spare(spare, view.footprints, _excess_bytes(view, need, workspace_bytes, gone))
    if cancelled is None:
        raise NoSpaceError(
            f"no room for {need} bytes and {workspace_bytes} of workspace: {view.resident_bytes} are resident and "
            f"{view.workspace_bytes} in use, the budget is {view.budget_bytes}, the arena has {view.capacity_bytes}"
        )
    for spared in (cancelled, spare):
        without = gone.union(spared)
        for make in (_place_in_gaps, _place_after_compaction):
            admission = make(view, missing, without, tuple(evict), tuple(spared))
            if admission is not None:
                return admission
    raise BlockedError(f"{need} bytes fit, but not around the tensors that running queries hold")


def plan_prefetch(view: ArenaView, needed: Collection[str], evict: Collection[str]) -> Admission:
    """How all that is `needed` becomes resident, `evict` forgotten, with nothing cancelled or moved for it.

    Raises NoSpaceError when it does not fit so, and what `check_evictable` raises.
    """
    check_evictable(view, evict, needed)
    missing = _missing(view, needed)
    if not missing and not evict:
        return NOTHING_TO_DO
    gone, need = set(evict), _occupied_bytes(view, missing)
    fits = _excess_bytes(view, need, 0, gone) <= 0
    admission = _place_in_gaps(view, missing, gone, tuple(evict), ()) if fits else None
    if admission is None:
        raise NoSpaceError(f"no room for {need} bytes beside what stays")
    return admission


def check_evictable(view: ArenaView, evict: Iterable[str], needed: Collection[str] = ()) -> None:
    """ValueError when a tensor to be evicted is held or needed, KeyError when it is not resident."""
    for name in evict:
        if view.holds(name):
            raise ValueError(f"{name} is held by a running query")
        if name in needed:
            raise ValueError(f"{name} is to be evicted and needed")
        view.placed[name]


def _missing(view: ArenaView, needed: Iterable[str]) -> list[str]:
    """Those that are not resident, in stored order."""
    placed, extents = view.placed, view.extents
    missing = [name for name in needed if name not in placed]
    missing.sort(key=extents.__getitem__)
    return missing


def _occupied_bytes(view: ArenaView, names: Iterable[str]) -> int:
    return sum(map(view.footprints.__getitem__, names))


def _excess_bytes(view: ArenaView, need: int, workspace_bytes: int, gone: Collection[str]) -> int:
    """Bytes by which the budget or the range is exceeded once `gone` is forgotten and `need` more are resident."""
    resident = view.resident_bytes - _occupied_bytes(view, gone) + need
    return max(resident + view.workspace_bytes + workspace_bytes - view.budget_bytes, resident - view.capacity_bytes)


def _pick_spare(spare: Iterable[str], footprints: Mapping[str, int], excess: int) -> list[str] | None:
    """The first of the spare tensors that free so many bytes; None if all of them don't."""
    chosen = []
    for name in spare:
        if excess <= 0:
            break
        chosen.append(name)
        excess -= footprints[name]
    return chosen if excess <= 0 else None


def _place_in_gaps(
    view: ArenaView, missing: Sequence[str], gone: Collection[str], evicted: tuple[str, ...], cancelled: tuple[str, ...]
) -> Admission | None:
    """Places in the present gaps once `gone` is forgotten; None when the tensors fit nowhere."""
    free = FreeList(view.free)
    starts = [(view.placed[name].offset, view.footprints[name]) for name in gone]
    free.add((start, start + size) for start, size in starts)
    return _place(view, missing, free, evicted, cancelled, ())


def _place_after_compaction(
    view: ArenaView, missing: Sequence[str], gone: Collection[str], evicted: tuple[str, ...], cancelled: tuple[str, ...]
) -> Admission | None:
    """Places in the one gap that moving the fewest bytes makes; None when held tensors prevent it."""
    stay = {name: placed for name, placed in view.placed.items() if name not in gone}
    held = [name for name in stay if view.holds(name)]
    moves = plan_compaction(stay, held, view.capacity_bytes, _occupied_bytes(view, missing))
    stay.update((move.name, ArenaSpan(move.target, move.nbytes)) for move in moves)
    free = FreeList.between(stay.values(), view.capacity_bytes)
    return _place(view, missing, free, evicted, cancelled, moves)


def _place(
    view: ArenaView,
    missing: Sequence[str],
    free: FreeList,
    evicted: tuple[str, ...],
    cancelled: tuple[str, ...],
    moves: tuple[Move, ...],
) -> Admission | None:
    """The admission with each placed run as one copy, in stored order."""
    extents = view.extents
    runs = place_runs(free, stored_runs(missing, extents), view.footprints)
    if runs is None:
        return None
    placed = {name: ArenaSpan(0, 0) for name in missing if not extents[name].nbytes}
    copies = []
    for start, run in sorted(runs, key=lambda one: extents[one[1][0]].offset):
        source, ends = extents[run[0]].offset, []
        for name in run:
            offset, nbytes = extents[name]
            placed[name] = ArenaSpan(start + offset - source, nbytes)
            ends.append(offset + nbytes - source)
        copies.append(Copy(source, start, ends[-1], tuple(run), tuple(ends)))
    return Admission(evicted, cancelled, moves, tuple(copies), placed, free)
