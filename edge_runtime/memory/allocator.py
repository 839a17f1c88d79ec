"""Where tensors go in an address range: runs whole where they fit, parted where they don't, holes closed at need.

Copies: which stretches of the bundle go where in the arena, each as long as tensors lie together in both.

Admission: what must be forgotten, moved and copied for tensors to be resident. Decided here, kept by `Residency`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise
from typing import NamedTuple, Protocol

ALIGNMENT_BYTES = 512

Run = Sequence[tuple[str, int]]
"""Tensors that lie together in the bundle, in its order: (name, footprint in bytes), none of them empty."""


def footprint_bytes(nbytes: int) -> int:
    """What a tensor of `nbytes` occupies when resident: its bytes rounded up to the arena's alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Placement(NamedTuple):
    """Where a tensor lies: `nbytes` from `offset` on; it occupies `nbytes` rounded up to the alignment."""

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


class FreeList:
    """The free spans of an address range, in order, no two of them touching."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = list(spans)

    @classmethod
    def between(cls, placements: Iterable[Placement], capacity_bytes: int) -> FreeList:
        """What the placements leave free below `capacity_bytes`."""
        spans, free = [], 0
        for placed in sorted(placements, key=lambda placed: placed.offset):
            if free < placed.offset:
                spans.append((free, placed.offset))
            free = max(free, placed.end)
        return cls([*spans, (free, capacity_bytes)] if free < capacity_bytes else spans)

    def give(self, freed: Iterable[tuple[int, int]]) -> None:
        """Enter free spans (start, end), merged with the holes they touch; empty ones are nothing."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.spans, *freed]):
            if merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], end
            elif start < end:
                merged.append((start, end))
        self.spans = merged

    def take(self, size: int) -> int | None:
        """The start of the smallest hole of at least `size` bytes, which is taken from it; None if there is none."""
        fitting = [(end - start, index) for index, (start, end) in enumerate(self.spans) if end - start >= size]
        if not fitting:
            return None
        index = min(fitting)[1]
        start, end = self.spans[index]
        self.spans[index : index + 1] = [(start + size, end)] if end - start > size else []
        return start

    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max((end - start for start, end in self.spans), default=0)


def place_runs(holes: FreeList, runs: Iterable[Run]) -> dict[str, int] | None:
    """Offsets for all tensors of the runs, taken from `holes`; None when one of them fits nowhere.

    The longest run goes first, whole into the smallest hole that it fits; one that fits none is parted where the
    largest hole would be full, because a copy more costs microseconds and a compaction moves megabytes. Where one
    hole has room for everything it always succeeds: what lies elsewhere leaves only more of that hole.
    """
    order = count()
    waiting = [(-sum(size for _, size in run), next(order), run) for run in runs if run]
    heapify(waiting)
    offsets: dict[str, int] = {}
    while waiting:
        negative, _, run = heappop(waiting)
        start = holes.take(-negative)
        if start is not None:
            for name, size in run:
                offsets[name] = start
                start += size
            continue
        room = holes.largest()
        fitting = sum(end <= room for end in accumulate(size for _, size in run))
        if not fitting:
            return None
        for part in (run[:fitting], run[fitting:]):
            heappush(waiting, (-sum(size for _, size in part), next(order), part))
    return offsets


def plan_compaction(
    placed: Mapping[str, Placement], pinned: Iterable[str], capacity_bytes: int, need_bytes: int
) -> tuple[Move, ...]:
    """The moves that make one hole of `need_bytes` by moving the fewest bytes; in this order, towards the start.

    Neighbours that are not pinned slide together until the free bytes around them are enough. Where no such
    neighbours exist, everything that is not pinned slides.
    """
    fixed = set(pinned)
    items = sorted(((name, one) for name, one in placed.items() if one.nbytes), key=lambda item: item[1].offset)
    best: tuple[int, int, int] | None = None
    for first, last in _stretches(items, fixed):
        low, size = first, 0
        for high in range(first, last):
            size += _size(items[high][1])
            while low < high:
                smaller = size - _size(items[low][1])
                if _room(items, low + 1, high, capacity_bytes) - smaller < need_bytes:
                    break
                size, low = smaller, low + 1
            if _room(items, low, high, capacity_bytes) - size >= need_bytes and (best is None or size < best[0]):
                best = size, low, high + 1
    windows = [best[1:]] if best else _stretches(items, fixed)
    return tuple(move for low, high in windows for move in _slide(items, low, high))


_Items = list[tuple[str, Placement]]


def _size(placed: Placement) -> int:
    return placed.end - placed.offset


def _stretches(items: _Items, fixed: set[str]) -> list[tuple[int, int]]:
    """Ranges of items between pinned ones."""
    walls = [-1, *(index for index, (name, _) in enumerate(items) if name in fixed), len(items)]
    return [(wall + 1, following) for wall, following in pairwise(walls) if wall + 1 < following]


def _room(items: _Items, low: int, high: int, capacity_bytes: int) -> int:
    """Bytes between the neighbours of items low to high, those items included."""
    return (items[high + 1][1].offset if high + 1 < len(items) else capacity_bytes) - _floor(items, low)


def _floor(items: _Items, low: int) -> int:
    return items[low - 1][1].end if low else 0


def _slide(items: _Items, low: int, high: int) -> Iterable[Move]:
    free = _floor(items, low)
    for name, placed in items[low:high]:
        if free < placed.offset:
            yield Move(name, placed.offset, free, placed.nbytes)
        free += _size(placed)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor is stored: `nbytes` from `offset` on in the bundle's data section, at a multiple of 512."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + footprint_bytes(self.nbytes)


@dataclass(frozen=True, slots=True)
class Copy:
    """Tensors that lie together in the bundle and in the arena, moved at once, the gaps between them included.

    `ends` says how many bytes of the copy must have arrived for each of the `names` to be there.
    """

    source: int
    target: int
    nbytes: int
    names: tuple[str, ...]
    ends: tuple[int, ...]


def stored_runs(
    names: Iterable[str], extents: Mapping[str, Extent], footprints: Mapping[str, int]
) -> list[list[tuple[str, int]]]:
    """Tensors, in the order they are stored in, with the bytes they will occupy, in groups that lie together in the
    bundle; empty ones need no place.
    """
    runs: list[list[tuple[str, int]]] = []
    end = -1
    for name in names:
        extent = extents[name]
        if not extent.nbytes:
            continue
        if extent.offset != end:
            runs.append([])
        runs[-1].append((name, footprints[name]))
        end = extent.end
    return runs


def copies_of(
    names: Collection[str], extents: Mapping[str, Extent], placed: Mapping[str, Placement]
) -> tuple[Copy, ...]:
    """One copy for each stretch of tensors, in the order they are stored in, that lie together in both places."""
    groups: list[list[str]] = []
    stored_end = placed_end = -1
    for name in names:
        extent, offset = extents[name], placed[name].offset
        if not extent.nbytes:
            continue
        if extent.offset != stored_end or offset != placed_end:
            groups.append([])
        groups[-1].append(name)
        stored_end, placed_end = extent.end, offset + footprint_bytes(extent.nbytes)
    return tuple(_copy(tuple(group), extents, placed) for group in groups)


def _copy(names: tuple[str, ...], extents: Mapping[str, Extent], placed: Mapping[str, Placement]) -> Copy:
    source = extents[names[0]].offset
    ends = tuple(extents[name].offset + extents[name].nbytes - source for name in names)
    return Copy(source, placed[names[0]].offset, ends[-1], names, ends)


class NoSpaceError(MemoryError):
    """What is needed does not fit beside what stays."""


class BlockedError(NoSpaceError):
    """What is needed fits by its bytes, but tensors of a running query stand in the way until it is done."""


class ArenaView(Protocol):
    """What is decided from: the tensors there are, those that are resident, and who needs them (see `Residency`)."""

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
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def footprints(self) -> Mapping[str, int]: ...
    @property
    def placed(self) -> Mapping[str, Placement]: ...
    @property
    def prefetched(self) -> Sequence[str]: ...
    @property
    def holes(self) -> Sequence[tuple[int, int]]: ...
    def holds(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """What must be done, in this order, for tensors to be resident: evictions, forgotten prefetches, moves, copies.

    `placed` says where those lie that were missing, in the order they are stored in, and `holes` what is then free;
    None where nothing has to be done.
    """

    evicted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[Copy, ...] = ()
    placed: Mapping[str, Placement] = field(default_factory=dict)
    holes: FreeList | None = None


NOTHING = Admission()


def plan_admission(kept: ArenaView, needed: Collection[str], workspace_bytes: int, evict: Collection[str]) -> Admission:
    """How all that is `needed`, each name once, becomes resident with room for a workspace, `evict` forgotten.

    What fits by its bytes succeeds: prefetched tensors are cancelled as far as the budget asks, newest first, then
    tensors that nobody holds are moved. Raises NoRoomError when it does not fit by its bytes, BlockedError when held
    tensors stand in the way (release them and it succeeds), and what `check_evictable` raises.
    """
    check_evictable(kept, evict, needed)
    missing = _missing(kept, needed)
    if not missing and not evict and _excess(kept, 0, workspace_bytes, ()) <= 0:
        return NOTHING
    gone, need = set(evict), _occupied(kept, missing)
    spare = [name for name in reversed(kept.prefetched) if name not in needed and name not in gone]
    cancelled = _enough(spare, kept.footprints, _excess(kept, need, workspace_bytes, gone))
    if cancelled is None:
        raise NoSpaceError(
            f"no room for {need} bytes and {workspace_bytes} of workspace: {kept.resident_bytes} are resident and "
            f"{kept.workspace_bytes} in use, the budget is {kept.budget_bytes}, the arena has {kept.capacity_bytes}"
        )
    found = _places(kept, missing, gone.union(cancelled)) or _made_places(kept, missing, gone.union(cancelled))
    if found is None:
        cancelled = spare
        found = _places(kept, missing, gone.union(cancelled)) or _made_places(kept, missing, gone.union(cancelled))
    if found is None:
        raise BlockedError(f"{need} bytes fit, but not around the tensors that running queries hold")
    copies = copies_of(missing, kept.extents, found.placed)
    return Admission(tuple(evict), tuple(cancelled), found.moves, copies, found.placed, found.holes)


def plan_prefetch(kept: ArenaView, needed: Collection[str], evict: Collection[str]) -> Admission:
    """How all that is `needed` becomes resident, `evict` forgotten, with nothing cancelled or moved for it.

    Raises NoRoomError when it does not fit so, and what `check_evictable` raises.
    """
    check_evictable(kept, evict, needed)
    missing = _missing(kept, needed)
    if not missing and not evict:
        return NOTHING
    gone, need = set(evict), _occupied(kept, missing)
    found = _places(kept, missing, gone) if _excess(kept, need, 0, gone) <= 0 else None
    if found is None:
        raise NoSpaceError(f"no room for {need} bytes beside what stays")
    copies = copies_of(missing, kept.extents, found.placed)
    return Admission(tuple(evict), copies=copies, placed=found.placed, holes=found.holes)


def check_evictable(kept: ArenaView, evict: Iterable[str], needed: Collection[str] = ()) -> None:
    """ValueError when a tensor to be evicted is held or needed, KeyError when it is not resident."""
    for name in evict:
        if kept.holds(name):
            raise ValueError(f"{name} is held by a running query")
        if name in needed:
            raise ValueError(f"{name} is to be evicted and needed")
        kept.placed[name]


class _Places(NamedTuple):
    """What is free after all, and where what was moved and what was missing lies."""

    holes: FreeList
    moves: tuple[Move, ...]
    placed: Mapping[str, Placement]


def _missing(kept: ArenaView, needed: Iterable[str]) -> list[str]:
    """Those that are not resident, in the order they are stored in."""
    placed, extents = kept.placed, kept.extents
    return sorted((name for name in needed if name not in placed), key=lambda name: extents[name].offset)


def _occupied(kept: ArenaView, names: Iterable[str]) -> int:
    return sum(map(kept.footprints.__getitem__, names))


def _excess(kept: ArenaView, need: int, workspace_bytes: int, gone: Collection[str]) -> int:
    """Bytes by which the budget or the range is passed once `gone` is forgotten and `need` more are resident."""
    resident = kept.resident_bytes - _occupied(kept, gone) + need
    return max(resident + kept.workspace_bytes + workspace_bytes - kept.budget_bytes, resident - kept.capacity_bytes)


def _enough(spare: Iterable[str], footprints: Mapping[str, int], excess: int) -> list[str] | None:
    """The first of the spare tensors that make up for so many bytes; None if all of them don't."""
    chosen = []
    for name in spare:
        if excess <= 0:
            break
        chosen.append(name)
        excess -= footprints[name]
    return chosen if excess <= 0 else None


def _places(kept: ArenaView, missing: Collection[str], gone: Collection[str]) -> _Places | None:
    """Places in the holes there are once `gone` is forgotten; None when the tensors fit nowhere."""
    holes = FreeList(kept.holes)
    starts = [(kept.placed[name].offset, kept.footprints[name]) for name in gone]
    holes.give((start, start + size) for start, size in starts)
    return _spread(kept, missing, holes, ())


def _made_places(kept: ArenaView, missing: Collection[str], gone: Collection[str]) -> _Places | None:
    """Places in the one hole that moving the fewest bytes makes; None when held tensors stand in the way."""
    stay = {name: placed for name, placed in kept.placed.items() if name not in gone}
    held = [name for name in stay if kept.holds(name)]
    moves = plan_compaction(stay, held, kept.capacity_bytes, _occupied(kept, missing))
    stay.update((move.name, Placement(move.target, move.nbytes)) for move in moves)
    return _spread(kept, missing, FreeList.between(stay.values(), kept.capacity_bytes), moves)


def _spread(kept: ArenaView, missing: Collection[str], holes: FreeList, moves: tuple[Move, ...]) -> _Places | None:
    offsets = place_runs(holes, stored_runs(missing, kept.extents, kept.footprints))
    if offsets is None:
        return None
    return _Places(holes, moves, {name: Placement(offsets.get(name, 0), kept.sizes[name]) for name in missing})
