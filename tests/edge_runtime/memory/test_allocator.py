"""Places and residency: random schedules keep the budget and move exactly what is missing; who makes way for whom."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.edge_runtime.memory.allocator import BlockedError, Extent, NoSpaceError, Residency
from tests.edge_runtime.memory.schedules import RandomSchedule

KIB = 1024
SLOT = 512
SCHEDULES_EACH = 25


def residency_of(capacity: int, *sizes: int, budget_bytes: int | None = None) -> Residency:
    """Tensors a, b, c ... of these sizes, end to end as in a bundle."""
    extents: dict[str, Extent] = {}
    for name, size in zip("abcdefghij", sizes, strict=False):
        extents[name] = Extent(max((extent.end for extent in extents.values()), default=0), size)
    return Residency(capacity, extents, budget_bytes)


def copied_names(admission) -> list[str]:
    return ["".join(copy.names) for copy in admission.copies]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - SCHEDULES_EACH), st.integers(5, 25))
def test_residency_random_schedules_keep_the_budget(seed, steps):
    for index in range(SCHEDULES_EACH):
        RandomSchedule(random.Random(seed + index)).play(steps)


def test_residency_random_schedules_cover_all_cases():
    played = [RandomSchedule(random.Random(seed)) for seed in range(2000)]
    for schedule in played:
        schedule.play(25)
    assert all(sum(getattr(one, seen) for one in played) > 0 for seen in ("moved", "refused", "blocked"))


def test_admit_resident_tensor_splits_a_run():
    residency = residency_of(8 * KIB, *[SLOT] * 3)
    residency.admit("b")
    assert copied_names(residency.admit("abc")) == ["a", "c"]
    assert residency.placed["b"].offset == 0 and residency.admit("abc").copies == ()


def test_admit_splits_a_run_before_compacting():
    residency = residency_of(5 * SLOT, *[SLOT] * 7)
    residency.admit("abcde")
    admission = residency.admit("fg", evict="bd")
    assert not admission.moves and copied_names(admission) == ["f", "g"] and admission.evicted == ("b", "d")


def test_compaction_moves_the_fewest_bytes():
    residency = residency_of(16 * SLOT, *[SLOT] * 3, 8 * SLOT, *[SLOT] * 3, 2 * SLOT, 4 * SLOT)
    residency.admit("abcdefg")  # 14 of 16 slots are taken
    assert not residency.admit("h", evict="ac").moves, "there are two slots at the end"
    residency.evict("h")
    residency.admit("a")
    residency.evict("eg")
    before = residency.placed["d"]
    admission = residency.admit("i")
    assert sum(move.nbytes for move in admission.moves) == SLOT and residency.placed["d"] == before


def test_admit_cancels_as_few_prefetches_as_needed_newest_first():
    residency = residency_of(4 * SLOT, *[SLOT] * 7)
    residency.admit_prefetch("ab")
    residency.admit("a")
    assert residency.prefetched == ("b",)
    residency.admit_prefetch("cd")
    assert residency.admit("e").cancelled == ("d",)
    assert residency.admit("fg", evict="a").cancelled == ("c",) and residency.resident == set("befg")
    residency.hold("b")
    assert residency.prefetched == ()


def test_admit_prefetch_takes_only_free_memory():
    residency = residency_of(3 * SLOT, *[SLOT] * 5, budget_bytes=4 * SLOT)
    residency.admit("a", 2 * SLOT)
    residency.hold("a", 2 * SLOT)
    with pytest.raises(NoSpaceError, match="1024 bytes beside what stays"):
        residency.admit_prefetch("bc")
    assert residency.resident == {"a"}
    residency.admit_prefetch("b")
    with pytest.raises(NoSpaceError, match="512 bytes beside what stays"):
        residency.admit_prefetch("c")
    assert residency.admit_prefetch("c", evict="b").evicted == ("b",) and residency.resident == set("ac")


def test_budget_covers_workspaces():
    residency = residency_of(4 * SLOT, *[SLOT] * 4, budget_bytes=4 * SLOT)
    with pytest.raises(NoSpaceError, match="1025 of workspace") as refused:
        residency.admit("ab", 1025)
    assert not isinstance(refused.value, BlockedError)
    residency.admit("ab", 1024)
    residency.hold("ab", 1024)
    with pytest.raises(NoSpaceError):
        residency.admit("c")
    with pytest.raises(NoSpaceError):
        residency.hold("a", 1)
    residency.release("ab", 1024)
    residency.admit("cd")
    assert residency.resident == set("abcd")


def test_held_tensors_block_only_what_fits_nowhere():
    residency = residency_of(5 * SLOT, *[SLOT] * 5, 3 * SLOT)
    residency.admit("abcde")
    residency.hold("c")
    with pytest.raises(BlockedError, match="running queries hold"):
        residency.admit("f", evict="abd")
    assert residency.resident == set("abcde"), "nothing is done by halves"
    residency.release("c")
    assert residency.admit("f", evict="abd").moves and residency.resident == set("cef")


def test_evict_held_tensor_is_refused_as_a_whole():
    residency = residency_of(4 * KIB, 10, 10)
    residency.admit("ab")
    for change in (residency.hold, residency.hold, residency.release):
        change("b")
    with pytest.raises(ValueError, match="b is held"):
        residency.evict("ab")
    with pytest.raises(ValueError, match="b is held"):
        residency.admit_prefetch("a", evict="b")
    assert residency.resident == {"a", "b"}
    residency.release("b")
    residency.evict("ab")
    assert residency.resident == frozenset()


def test_residency_misuse_is_refused():
    residency = residency_of(4 * KIB, 10, 10)
    residency.admit("a")
    with pytest.raises(ValueError, match="a is to be evicted and needed"):
        residency.admit("a", evict="a")
    for change in (residency.evict, residency.hold):
        with pytest.raises(KeyError):
            change("b")
    with pytest.raises(ValueError, match="-1"):
        Residency(-1, {})
