from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.costs import footprint_bytes
from edge_runtime.residency import Residency

KIB = 1024
NAMES = tuple("abcdefgh")


def spans(residency: Residency) -> list[tuple[int, int]]:
    placements = [residency.placement(name) for name in residency.resident]
    return sorted((p.offset, p.end) for p in placements if p.nbytes)


def check(residency: Residency, sizes: dict[str, int]) -> None:
    taken = spans(residency)
    assert all(start % 512 == 0 for start, _ in taken)
    assert all(end <= following for (_, end), (following, _) in pairwise(taken))
    assert not taken or taken[-1][1] <= residency.capacity_bytes
    assert residency.resident_bytes == sum(footprint_bytes(sizes[name]) for name in residency.resident)
    edges = sorted([*taken, *residency._holes])
    assert [start for start, _ in edges] == [0, *(end for _, end in edges)][:len(edges)]
    assert not edges or edges[-1][1] == residency.capacity_bytes
    assert all(a[1] < b[0] for a, b in pairwise(residency._holes)), "holes are merged"


@given(st.integers(0, 40 * KIB), st.fixed_dictionaries({name: st.integers(0, 9 * KIB) for name in NAMES}),
       st.lists(st.tuples(st.sampled_from(["place", "evict", "hold", "release", "compact"]), st.sampled_from(NAMES))))
def test_tensors_never_overlap_and_every_byte_is_either_taken_or_free(capacity, sizes, steps):
    residency = Residency(capacity)
    memory = bytearray(residency.capacity_bytes)
    for step, name in steps:
        resident = name in residency.resident
        if step == "place" and not resident:
            room = max((end - start for start, end in residency._holes), default=0)
            placed = residency.place(name, sizes[name])
            assert (placed is None) == (footprint_bytes(sizes[name]) > room)
            if placed:
                memory[placed.offset:placed.offset + placed.nbytes] = name.encode() * placed.nbytes
        elif step == "evict" and resident and not residency.holds(name):
            residency.evict([name])
        elif step == "hold" and resident:
            residency.hold([name])
        elif step == "release" and residency.holds(name):
            residency.release([name])
        elif step == "compact":
            held = {other: residency.placement(other) for other in residency.resident if residency.holds(other)}
            for move in residency.compact():
                assert move.target < move.source
                memory[move.target:move.target + move.nbytes] = memory[move.source:move.source + move.nbytes]
            assert all(residency.placement(other) == placed for other, placed in held.items())
            if not held:
                assert len(residency._holes) <= 1, "without held tensors all free bytes are in one hole"
        check(residency, sizes)
        for other in residency.resident:
            at = residency.placement(other)
            assert memory[at.offset:at.offset + at.nbytes] == other.encode() * at.nbytes


def test_only_missing_tensors_are_reported_once_and_in_order():
    residency = Residency(4 * KIB)
    residency.place("b", 10)
    assert residency.missing(["a", "b", "c", "a"]) == ("a", "c")


def test_a_held_tensor_is_not_evicted_and_its_neighbours_are_not_either():
    residency = Residency(4 * KIB)
    residency.place("a", 10)
    residency.place("b", 10)
    residency.hold(["b"])
    residency.hold(["b"])
    residency.release(["b"])
    with pytest.raises(ValueError, match="b is held"):
        residency.evict(["a", "b"])
    assert residency.resident == {"a", "b"}
    residency.release(["b"])
    residency.evict(["a", "b"])
    assert residency.resident == frozenset()


def test_misuse_is_refused():
    residency = Residency(4 * KIB)
    residency.place("a", 10)
    with pytest.raises(ValueError, match="resident already"):
        residency.place("a", 10)
    with pytest.raises(ValueError, match="not held"):
        residency.release(["a"])
    with pytest.raises(KeyError):
        residency.evict(["b"])
    with pytest.raises(KeyError):
        residency.hold(["b"])
    with pytest.raises(ValueError, match="-1"):
        Residency(-1)
