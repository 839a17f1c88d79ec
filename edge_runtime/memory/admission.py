"""Admission: what must be forgotten, moved and copied for tensors to be resident. Decided here, kept by `Residency`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from edge_runtime.memory.copies import Copy, Extent, copies_of, stored_runs
from edge_runtime.memory.placing import Holes, Move, Placement, closing, spread


class NoRoomError(MemoryError):
    """What is needed does not fit beside what stays."""


class BlockedError(NoRoomError):
    """What is needed fits by its bytes, but tensors of a running query stand in the way until it is done."""


class Kept(Protocol):
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
    holes: Holes | None = None


NOTHING = Admission()


def admission_of(kept: Kept, needed: Collection[str], workspace_bytes: int, evict: Collection[str]) -> Admission:
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
        raise NoRoomError(
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


def admission_ahead(kept: Kept, needed: Collection[str], evict: Collection[str]) -> Admission:
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
        raise NoRoomError(f"no room for {need} bytes beside what stays")
    copies = copies_of(missing, kept.extents, found.placed)
    return Admission(tuple(evict), copies=copies, placed=found.placed, holes=found.holes)


def check_evictable(kept: Kept, evict: Iterable[str], needed: Collection[str] = ()) -> None:
    """ValueError when a tensor to be evicted is held or needed, KeyError when it is not resident."""
    for name in evict:
        if kept.holds(name):
            raise ValueError(f"{name} is held by a running query")
        if name in needed:
            raise ValueError(f"{name} is to be evicted and needed")
        kept.placed[name]


class _Places(NamedTuple):
    """What is free after all, and where what was moved and what was missing lies."""

    holes: Holes
    moves: tuple[Move, ...]
    placed: Mapping[str, Placement]


def _missing(kept: Kept, needed: Iterable[str]) -> list[str]:
    """Those that are not resident, in the order they are stored in."""
    placed, extents = kept.placed, kept.extents
    return sorted((name for name in needed if name not in placed), key=lambda name: extents[name].offset)


def _occupied(kept: Kept, names: Iterable[str]) -> int:
    return sum(map(kept.footprints.__getitem__, names))


def _excess(kept: Kept, need: int, workspace_bytes: int, gone: Collection[str]) -> int:
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


def _places(kept: Kept, missing: Collection[str], gone: Collection[str]) -> _Places | None:
    """Places in the holes there are once `gone` is forgotten; None when the tensors fit nowhere."""
    holes = Holes(kept.holes)
    starts = [(kept.placed[name].offset, kept.footprints[name]) for name in gone]
    holes.give((start, start + size) for start, size in starts)
    return _spread(kept, missing, holes, ())


def _made_places(kept: Kept, missing: Collection[str], gone: Collection[str]) -> _Places | None:
    """Places in the one hole that moving the fewest bytes makes; None when held tensors stand in the way."""
    stay = {name: placed for name, placed in kept.placed.items() if name not in gone}
    held = [name for name in stay if kept.holds(name)]
    moves = closing(stay, held, kept.capacity_bytes, _occupied(kept, missing))
    stay.update((move.name, Placement(move.target, move.nbytes)) for move in moves)
    return _spread(kept, missing, Holes.between(stay.values(), kept.capacity_bytes), moves)


def _spread(kept: Kept, missing: Collection[str], holes: Holes, moves: tuple[Move, ...]) -> _Places | None:
    offsets = spread(holes, stored_runs(missing, kept.extents, kept.footprints))
    if offsets is None:
        return None
    return _Places(holes, moves, {name: Placement(offsets.get(name, 0), kept.sizes[name]) for name in missing})
