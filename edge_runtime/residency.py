"""Residency: which tensors lie where in the arena, by content name. Bookkeeping only; `arena.py` moves the bytes."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from edge_runtime.costs import ALIGNMENT_BYTES, footprint_bytes


@dataclass(frozen=True, slots=True)
class Placement:
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


class Residency:
    """Tensors by content name in one address range, placed first-fit at multiples of 512 bytes.

    A tensor is there once, however many queries need it. Queries `hold` the tensors they run with; a held tensor
    is neither evicted nor moved. Eviction only forgets.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"an arena cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._placed: dict[str, Placement] = {}
        self._holds: Counter[str] = Counter()
        self._holes: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self.resident_bytes = 0

    @property
    def resident(self) -> frozenset[str]:
        """The names of all resident tensors."""
        return frozenset(self._placed)

    def placement(self, name: str) -> Placement:
        """Where a resident tensor lies; KeyError when it is not resident."""
        return self._placed[name]

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are not resident, each once, in the order given."""
        return tuple(name for name in dict.fromkeys(names) if name not in self._placed)

    def place(self, name: str, nbytes: int) -> Placement | None:
        """Give a tensor the first hole it fits; None if no hole is large enough. ValueError if it is resident."""
        if name in self._placed:
            raise ValueError(f"{name} is resident already")
        size = footprint_bytes(nbytes)
        if not size:
            self._placed[name] = Placement(0, nbytes)
            return self._placed[name]
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[index:index + 1] = [(start + size, end)] if end - start > size else []
                self._placed[name] = placement = Placement(start, nbytes)
                self.resident_bytes += size
                return placement
        return None

    def evict(self, names: Iterable[str]) -> None:
        """Forget tensors. ValueError, with nothing forgotten, when one is held; KeyError when one is not resident."""
        names = tuple(names)
        for name in names:
            if self._holds[name]:
                raise ValueError(f"{name} is held by a running query")
            self._placed[name]
        for name in names:
            placement = self._placed.pop(name)
            self.resident_bytes -= placement.end - placement.offset
            self._free(placement.offset, placement.end)

    def hold(self, names: Iterable[str]) -> None:
        """Count a use of resident tensors; KeyError, with nothing counted, when one is not resident."""
        names = tuple(names)
        for name in names:
            self._placed[name]
        self._holds.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Take back one `hold` of the same names."""
        for name in names:
            if self._holds[name] < 1:
                raise ValueError(f"{name} is not held")
            self._holds[name] -= 1

    def holds(self, name: str) -> int:
        """How many queries hold a tensor."""
        return self._holds[name]

    def compact(self) -> tuple[Move, ...]:
        """Close the holes: tensors slide towards the start, held ones stay. The moves must be made in this order."""
        moves = []
        free = 0
        self._holes = []
        for name, placed in sorted(self._placed.items(), key=lambda item: item[1].offset):
            size = placed.end - placed.offset
            if not size:
                continue
            if self._holds[name]:
                self._add_hole(free, placed.offset)
                free = placed.end
                continue
            if free < placed.offset:
                moves.append(Move(name, placed.offset, free, placed.nbytes))
                self._placed[name] = Placement(free, placed.nbytes)
            free += size
        self._add_hole(free, self.capacity_bytes)
        return tuple(moves)

    def _add_hole(self, start: int, end: int) -> None:
        if start < end:
            self._holes.append((start, end))

    def _free(self, start: int, end: int) -> None:
        """Enter a hole, merged with the holes it touches."""
        if start == end:
            return
        for hole in [hole for hole in self._holes if hole[1] == start or hole[0] == end]:
            self._holes.remove(hole)
            start, end = min(start, hole[0]), max(end, hole[1])
        insort(self._holes, (start, end))
