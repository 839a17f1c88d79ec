"""From sets of queries to boxes and queries by name, moving as few bytes as can be from where they were before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from gemel.fleet import Fleet
from gemel.placing.filling import Filling
from gemel.placing.needs import Counts, Needs
from gemel.placing.rooms import Filled, Room

Placed = dict[str, list[str]]
"""The queries of each box that has any, both by name."""


def by_name(needs: Needs, fleet: Fleet, filled: Sequence[Filled], before: Mapping[str, Sequence[str]]) -> Placed:
    """Which box is which, and which of equal queries goes where: so that most bytes are there already."""
    sort_of = needs.sort_of
    was = {box: [query for query in queries if query in sort_of] for box, queries in before.items()}
    boxes = dict[str, np.ndarray]()
    for kind, entry in enumerate(fleet.boxes):
        sets = [one.counts for one in filled if one.room == kind]
        if not sets:
            continue
        names = sorted(entry.names(), key=lambda name: not was.get(name))[: len(was) + len(sets)]
        olds = [needs.counts(was.get(name, ())) for name in names]
        moved = np.array([[_added(needs, old, new) for old in olds] for new in sets], dtype=float)
        rows, columns = linear_sum_assignment(moved)
        boxes |= {names[int(name)]: sets[int(new)] for new, name in zip(rows, columns, strict=True)}
    left = {at: list(sort.queries) for at, sort in enumerate(needs.sorts)}
    placed = {box: list[str]() for box in boxes}
    for box, counts in boxes.items():  # who was there stays, then come the others
        for query in was.get(box, ()):
            sort = sort_of[query]
            if query in left[sort] and sum(sort_of[one] == sort for one in placed[box]) < counts[sort]:
                placed[box].append(query)
                left[sort].remove(query)
    for box, counts in boxes.items():
        for sort in np.flatnonzero(counts).tolist():
            lacking = int(counts[sort]) - sum(sort_of[one] == sort for one in placed[box])
            placed[box] += left[sort][:lacking]
            del left[sort][:lacking]
    order = {query: at for at, query in enumerate(sort_of)}
    names = [name for entry in fleet.boxes for name in entry.names() if name in placed]
    return {name: sorted(placed[name], key=order.__getitem__) for name in names}


def as_before(needs: Needs, fleet: Fleet, rooms: Sequence[Room], before: Mapping[str, Sequence[str]]) -> list[Filled]:
    """The sets that an earlier placement comes to now: without queries that are gone, or have no room any more."""
    sort_of = needs.sort_of
    filled, seen = list[Filled](), set[str]()
    for kind, entry in enumerate(fleet.boxes):
        for name in entry.names():
            filling = Filling(needs, rooms[kind])
            for query in before.get(name, ()):
                if query in sort_of and query not in seen and filling.fits(sort_of[query]):
                    seen.add(query)
                    filling.add(sort_of[query], filling.more_bytes())
            if filling.counts.any():
                filled.append(Filled(kind, filling.counts))
    return filled


def moved_bytes(needs: Needs, placed: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]]) -> int:
    """Bytes that boxes lack of what they are to hold: of queries' own, and of pieces that nobody there needed."""
    total = 0
    for box, queries in placed.items():
        was = set(before.get(box, ()))
        total += sum(needs.sorts[needs.sort_of[query]].private_bytes for query in queries if query not in was)
        total += _new_pieces(needs, needs.counts(was), needs.counts(queries))
    return total


def _new_pieces(needs: Needs, old: Counts, new: Counts) -> int:
    """Bytes of the pieces that a box with these queries would lack of those."""
    return int((needs.there(new) & ~needs.there(old)) @ needs.piece_bytes)


def _added(needs: Needs, old: Counts, new: Counts) -> float:
    """Bytes that a box with these queries would lack of those; one that holds nothing yet is no better than another."""
    return float(np.maximum(new - old, 0) @ needs.private + _new_pieces(needs, old, new))
