"""Where tensors go in an address range: runs whole where they fit, parted where they don't, holes closed at need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, pairwise
from typing import NamedTuple

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


class Holes:
    """The free spans of an address range, in order, no two of them touching."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = list(spans)

    @classmethod
    def between(cls, placements: Iterable[Placement], capacity_bytes: int) -> Holes:
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


def spread(holes: Holes, runs: Iterable[Run]) -> dict[str, int] | None:
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


def closing(
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
