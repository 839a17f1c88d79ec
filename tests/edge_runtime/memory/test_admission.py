"""What has to be done for tensors to be resident, decided without doing any of it."""

from __future__ import annotations

import random

import pytest

from edge_runtime.memory.allocator import (
    ArenaSpan,
    BlockedError,
    Extent,
    FreeList,
    NoSpaceError,
    plan_admission,
    plan_prefetch,
)
from edge_runtime.memory.residency import Residency
from tests.edge_runtime.memory.schedules import Box

SLOT = 512


def kept(capacity: int, placed: str, held: str = "", prefetched: str = "") -> Residency:
    """Tensors a to f of one slot each, end to end in the bundle; those `placed` lie so in the arena ("." is free)."""
    residency = Residency(capacity * SLOT, {name: Extent(at * SLOT, SLOT) for at, name in enumerate("abcdef")})
    residency.placed |= {name: ArenaSpan(at * SLOT, SLOT) for at, name in enumerate(placed) if name != "."}
    residency.resident_bytes = len(residency.placed) * SLOT
    residency._free = FreeList.between(residency.placed.values(), residency.capacity_bytes)
    residency._prefetched |= dict.fromkeys(prefetched)
    residency.hold(held)
    return residency


def state(residency: Residency) -> tuple[object, ...]:
    return dict(residency.placed), residency.free, residency.prefetched, residency.resident_bytes


def test_plan_admission_cancels_as_few_prefetches_as_needed():
    found = plan_admission(kept(5, "ab.c.", prefetched="bc"), "aef", 0, ())
    assert found.cancelled == () and found.placed == {"e": ArenaSpan(1024, 512), "f": ArenaSpan(2048, 512)}
    assert [copy.names for copy in found.copies] == [("e",), ("f",)]
    assert found.free is not None and not found.free.spans
    found = plan_admission(kept(4, "ab.c", prefetched="bc"), "aef", 0, ())
    assert found.cancelled == ("c",) and [copy.names for copy in found.copies] == [("e", "f")]


def test_plan_prefetch_cancels_and_moves_nothing():
    with pytest.raises(NoSpaceError, match="1024 bytes beside what stays"):
        plan_prefetch(kept(4, "ab.c", prefetched="bc"), "ef", ())
    found = plan_prefetch(kept(4, "ab.c"), "ef", "b")
    assert found.evicted == ("b",) and not found.moves and [copy.names for copy in found.copies] == [("e", "f")]


def test_plan_admission_without_space_gives_the_reason():
    with pytest.raises(NoSpaceError, match="no room for 1024 bytes") as refused:
        plan_admission(kept(4, "ab.c"), "ef", 0, ())
    assert not isinstance(refused.value, BlockedError)
    wide = {"a": Extent(0, SLOT), "b": Extent(SLOT, SLOT), "c": Extent(2 * SLOT, SLOT), "w": Extent(3 * SLOT, 2 * SLOT)}
    parted = Residency(3 * SLOT, wide)
    parted.admit("abc")
    parted.hold("b")
    with pytest.raises(BlockedError, match="running queries hold"):
        plan_admission(parted, "w", 0, "ac")
    parted.release("b")
    assert [move.name for move in plan_admission(parted, "w", 0, "ac").moves] == ["b"]
    with pytest.raises(ValueError, match="b is held"):
        plan_admission(kept(4, "ab", held="b"), "a", 0, "b")
    with pytest.raises(ValueError, match="a is to be evicted and needed"):
        plan_prefetch(kept(4, "ab"), "a", "a")
    with pytest.raises(KeyError):
        plan_admission(kept(4, "ab"), "a", 0, "f")


def test_plan_admission_is_pure_and_admit_carries_it_out():
    seen = 0
    for seed in range(300):
        box = Box(random.Random(seed))
        box.play(12)
        residency = box.residency
        for query, names in box.queries.items():
            before = state(residency)
            try:
                found = plan_admission(residency, names, box.workspaces[query], ())
            except NoSpaceError:
                assert state(residency) == before
                continue
            assert state(residency) == before
            done = residency.admit(names, box.workspaces[query])
            assert (done.cancelled, done.moves, done.copies) == (found.cancelled, found.moves, found.copies)
            box.carry_out(done)
            box.check()
            seen += bool(done.copies)
    assert seen > 20
