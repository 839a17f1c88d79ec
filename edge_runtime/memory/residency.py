"""Residency: which tensors lie where in the arena, by content name. Bookkeeping only; `arena.py` moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from edge_runtime.memory.placing import ALIGNMENT_BYTES, Holes, Move, Placement, closing, footprint_bytes, spread


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


@dataclass(frozen=True, slots=True)
class Admission:
    """What must be done, in this order, for tensors to be resident: forgotten prefetches, moves, copies."""

    cancelled: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[Copy, ...] = ()


class NoRoomError(MemoryError):
    """What is needed does not fit beside what stays."""


class BlockedError(NoRoomError):
    """What is needed fits by its bytes, but tensors of a running query stand in the way until it is done."""


class Residency:
    """Tensors by content name in one address range, at multiples of 512 bytes.

    A tensor is there once, however many queries need it. Queries `hold` the tensors they run with: these are
    neither evicted nor moved. Prefetched tensors are nobody's until they are admitted or held for a query, and make
    way for whatever is needed. `capacity_bytes` is the size of the range; footprints in it and the workspaces of
    what runs together never pass `budget_bytes` (the capacity, if none is given). `extents` says where every tensor
    is stored, `sizes` the bytes of those that take more here than stored. Eviction only forgets.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extents: Mapping[str, Extent],
        budget_bytes: int | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"an arena cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.budget_bytes = self.capacity_bytes if budget_bytes is None else budget_bytes
        self.extents = extents
        self._sizes = {name: extent.nbytes for name, extent in extents.items()} | dict(sizes or {})
        self._footprints = {name: footprint_bytes(nbytes) for name, nbytes in self._sizes.items()}
        self.resident_bytes = self.workspace_bytes = 0
        self._placed: dict[str, Placement] = {}
        self._holds: Counter[str] = Counter()
        self._prefetched: dict[str, None] = {}
        self._holes = Holes.between((), self.capacity_bytes)

    @property
    def resident(self) -> frozenset[str]:
        """The names of all resident tensors, prefetched ones included."""
        return frozenset(self._placed)

    @property
    def prefetched(self) -> tuple[str, ...]:
        """The tensors that no query has asked for yet, in the order they came."""
        return tuple(self._prefetched)

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """The free spans (start, end) of the range."""
        return tuple(self._holes.spans)

    def exceeds(self, workspace_bytes: int) -> bool:
        """Whether the whole range, with this workspace beside what runs already, is more than the budget."""
        return self.capacity_bytes + self.workspace_bytes + workspace_bytes > self.budget_bytes

    def __contains__(self, name: str) -> bool:
        """Whether a tensor is resident."""
        return name in self._placed

    def placement(self, name: str) -> Placement:
        """Where a resident tensor lies; KeyError when it is not resident."""
        return self._placed[name]

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are not resident, each once, in the order given."""
        return tuple(name for name in dict.fromkeys(names) if name not in self._placed)

    def holds(self, name: str) -> int:
        """How many queries hold a tensor."""
        return self._holds[name]

    def admit(
        self, names: Iterable[str], workspace_bytes: int = 0, evict: Collection[str] = (), ahead: bool = False
    ) -> Admission | None:
        """Forget `evict` and give every one of the names that is not resident a place, all or nothing.

        Afterwards there is room for `workspace_bytes` beside what runs already. What fits by its bytes succeeds:
        prefetched tensors are cancelled as far as the budget asks, then tensors that nobody holds are moved. With
        `ahead` the tensors count as prefetched, nothing is cancelled or moved for them, and None says that they do
        not fit. Raises NoRoomError when they do not fit by their bytes, BlockedError when held tensors stand in the
        way (release them and it succeeds), and ValueError or KeyError when `evict` names a tensor that is held,
        needed or not resident.
        """
        needed = dict.fromkeys(names)
        self._check_evictable(evict, needed)
        gone = set(evict)
        missing = sorted(self.missing(needed), key=lambda name: self.extents[name].offset)
        if not missing and not evict and self._fits(workspace_bytes):
            self._adopt(needed)
            return Admission()
        need = sum(map(self._footprints.__getitem__, missing))
        spare = (
            [] if ahead else [name for name in reversed(self._prefetched) if name not in needed and name not in gone]
        )
        cancelled = self._cancelled(need + workspace_bytes, need, gone, spare)
        if cancelled is None:
            if ahead:
                return None
            raise NoRoomError(
                f"no room for {need} bytes and {workspace_bytes} of workspace: {self.resident_bytes} are "
                f"resident and {self.workspace_bytes} in use, the budget is {self.budget_bytes}, the "
                f"arena has {self.capacity_bytes}"
            )
        place = self._place(missing, need, gone.union(cancelled), ahead)
        if place is None and not ahead:
            cancelled = spare
            place = self._place(missing, need, gone.union(cancelled), ahead)
        if place is None:
            if ahead:
                return None
            raise BlockedError(f"{need} bytes fit, but not around the tensors that running queries hold")
        holes, moves, placed = place
        self._forget((*evict, *cancelled))
        self._holes = holes
        self._placed.update((move.name, Placement(move.target, move.nbytes)) for move in moves)
        self._placed.update(placed)
        self.resident_bytes += need
        if ahead:
            self._prefetched.update(dict.fromkeys(missing))
        else:
            self._adopt(needed)
        return Admission(tuple(cancelled), moves, self._copies(missing))

    def evict(self, names: Iterable[str]) -> None:
        """Forget tensors. ValueError, with nothing forgotten, when one is held; KeyError when one is not resident."""
        names = tuple(names)
        self._check_evictable(names, ())
        self._holes.give(self._spans(names))
        self._forget(names)

    def hold(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Count a query that runs with these tensors and this workspace; they are no longer prefetched.

        KeyError when one is not resident and NoRoomError when the budget would be passed; nothing is counted then.
        """
        names = tuple(names)
        for name in names:
            self._placed[name]
        if not self._fits(workspace_bytes):
            raise NoRoomError(f"{workspace_bytes} bytes of workspace pass the budget of {self.budget_bytes}")
        self._holds.update(names)
        self.workspace_bytes += workspace_bytes
        self._adopt(names)

    def release(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Take back one `hold` of the same names and workspace."""
        holds = self._holds
        self.workspace_bytes -= workspace_bytes
        for name in names:
            if holds[name] < 1:
                raise ValueError(f"{name} is not held")
            holds[name] -= 1

    def _check_evictable(self, evict: Iterable[str], needed: Collection[str]) -> None:
        for name in evict:
            if self._holds[name]:
                raise ValueError(f"{name} is held by a running query")
            if name in needed:
                raise ValueError(f"{name} is to be evicted and needed")
            self._placed[name]

    def _cancelled(self, need_in_all: int, need: int, gone: Collection[str], spare: Iterable[str]) -> list[str] | None:
        """The prefetched tensors to give up for the budget and the capacity, newest first; None if it won't do."""
        resident = self.resident_bytes - sum(map(self._footprints.__getitem__, gone))
        excess = max(
            resident + self.workspace_bytes + need_in_all - self.budget_bytes, resident + need - self.capacity_bytes
        )
        cancelled = []
        for name in spare:
            if excess <= 0:
                break
            cancelled.append(name)
            excess -= self._footprints[name]
        return cancelled if excess <= 0 else None

    def _place(
        self, missing: Collection[str], need: int, gone: Collection[str], ahead: bool
    ) -> tuple[Holes, tuple[Move, ...], dict[str, Placement]] | None:
        """Holes, moves and new placements once `gone` is forgotten; None when the tensors fit nowhere."""
        holes, runs = self._holes.copy(), self._runs(missing)
        holes.give(self._spans(gone))
        moves: tuple[Move, ...] = ()
        offsets = spread(holes, runs)
        if offsets is None and not ahead:
            stay = {name: placed for name, placed in self._placed.items() if name not in gone}
            moves = closing(stay, [name for name in stay if self._holds[name]], self.capacity_bytes, need)
            stay.update((move.name, Placement(move.target, move.nbytes)) for move in moves)
            holes = Holes.between(stay.values(), self.capacity_bytes)
            offsets = spread(holes, runs)
        if offsets is None:
            return None
        return holes, moves, {name: Placement(offsets.get(name, 0), self._sizes[name]) for name in missing}

    def _runs(self, names: Iterable[str]) -> list[list[tuple[str, int]]]:
        """The tensors in groups that lie together in the bundle; empty ones need no place."""
        runs: list[list[tuple[str, int]]] = []
        end = -1
        for name in names:
            extent = self.extents[name]
            if not extent.nbytes:
                continue
            if extent.offset != end:
                runs.append([])
            runs[-1].append((name, self._footprints[name]))
            end = extent.end
        return runs

    def _copies(self, names: Collection[str]) -> tuple[Copy, ...]:
        """One copy for each stretch of placed tensors that lie together in the bundle and in the arena."""
        groups: list[list[str]] = []
        stored_end = placed_end = -1
        for name in names:
            extent, placed = self.extents[name], self._placed[name].offset
            if not extent.nbytes:
                continue
            if extent.offset != stored_end or placed != placed_end:
                groups.append([])
            groups[-1].append(name)
            stored_end, placed_end = extent.end, placed + footprint_bytes(extent.nbytes)
        return tuple(self._copy(tuple(group)) for group in groups)

    def _copy(self, names: tuple[str, ...]) -> Copy:
        source = self.extents[names[0]].offset
        ends = tuple(self.extents[name].offset + self.extents[name].nbytes - source for name in names)
        return Copy(source, self._placed[names[0]].offset, ends[-1], names, ends)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.resident_bytes -= self._footprints[name]
            del self._placed[name]
            self._prefetched.pop(name, None)

    def _adopt(self, names: Iterable[str]) -> None:
        for name in names if self._prefetched else ():
            self._prefetched.pop(name, None)

    def _fits(self, workspace_bytes: int) -> bool:
        """Whether a workspace fits beside what is resident and what runs."""
        return self.resident_bytes + self.workspace_bytes + workspace_bytes <= self.budget_bytes

    def _spans(self, names: Iterable[str]) -> list[tuple[int, int]]:
        starts = [(self._placed[name].offset, self._footprints[name]) for name in names]
        return [(start, start + size) for start, size in starts]
