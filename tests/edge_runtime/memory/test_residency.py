"""Residency under ten thousand random schedules: the budget holds, and exactly what is missing moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.memory.allocator import BlockedError, Extent, NoSpaceError
from edge_runtime.memory.residency import Residency
from tests.edge_runtime.memory.schedules import Box

KIB = 1024
SCHEDULES_EACH = 25


def laid(*sizes: int) -> dict[str, Extent]:
    """Tensors a, b, c ... of these sizes, end to end as in a bundle."""
    extents: dict[str, Extent] = {}
    for name, size in zip("abcdefghij", sizes):
        extents[name] = Extent(max((extent.end for extent in extents.values()), default=0), size)
    return extents


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - SCHEDULES_EACH), st.integers(5, 25))
def test_residency_random_schedules_keep_the_budget(seed, steps):
    for index in range(SCHEDULES_EACH):
        Box(random.Random(seed + index)).play(steps)


def test_residency_random_schedules_cover_all_cases():
    boxes = [Box(random.Random(seed)) for seed in range(2000)]
    for box in boxes:
        box.play(25)
    assert all(sum(getattr(box, seen) for box in boxes) > 0 for seen in ("moved", "refused", "blocked"))


def test_admit_resident_tensor_splits_a_run():
    residency = Residency(8 * KIB, laid(512, 512, 512))
    residency.admit("b")
    admission = residency.admit("abc")
    assert [copy.names for copy in admission.copies] == [("a",), ("c",)]
    assert residency.placement("b").offset == 0 and residency.admit("abc").copies == ()


def test_admit_splits_a_run_before_compacting():
    residency = Residency(5 * 512, laid(512, 512, 512, 512, 512, 512, 512))
    residency.admit("abcde")
    admission = residency.admit("fg", evict="bd")
    assert not admission.moves
    assert [copy.names for copy in admission.copies] == [("f",), ("g",)]


def test_compaction_moves_the_fewest_bytes():
    residency = Residency(16 * 512, laid(*[512] * 3, 4096, *[512] * 3, 1024, 4 * 512))
    residency.admit("abcdefg")  # 14 of 16 slots are taken
    admission = residency.admit("h", evict="ac")
    assert not admission.moves, "there are two slots at the end"
    residency.evict("h")
    residency.admit("a")
    residency.evict("eg")
    before = residency.placement("d")
    admission = residency.admit("i")
    assert sum(move.nbytes for move in admission.moves) == 512
    assert residency.placement("d") == before


def test_admit_cancels_prefetches_newest_first():
    residency = Residency(4 * 512, laid(*[512] * 6))
    residency.admit_prefetch("ab")
    assert residency.prefetched == ("a", "b")
    residency.admit("a")
    assert residency.prefetched == ("b",)
    residency.admit_prefetch("cd")
    admission = residency.admit("ef")
    assert admission.cancelled == ("d", "c") and residency.resident == set("abef")
    residency.hold("b")
    assert residency.prefetched == ()


def test_admit_prefetch_takes_only_free_memory():
    residency = Residency(3 * 512, laid(*[512] * 5), budget_bytes=4 * 512)
    residency.admit("a", 2 * 512)
    residency.hold("a", 2 * 512)
    with pytest.raises(NoSpaceError, match="1024 bytes beside what stays"):
        residency.admit_prefetch("bc")
    assert residency.resident == {"a"}
    residency.admit_prefetch("b")
    assert residency.admit_prefetch("c", evict="b").evicted == ("b",) and residency.resident == set("ac")
    with pytest.raises(ValueError, match="a is held"):
        residency.admit_prefetch("d", evict="a")


def test_budget_covers_workspaces():
    residency = Residency(4 * 512, laid(*[512] * 4), budget_bytes=4 * 512)
    with pytest.raises(NoSpaceError, match="1025 of workspace"):
        residency.admit("ab", 1025)
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
    residency = Residency(5 * 512, laid(512, 512, 512, 512, 512, 3 * 512))
    residency.admit("abcde")
    residency.hold("c")
    with pytest.raises(BlockedError, match="running queries hold"):
        residency.admit("f", evict="abd")
    assert residency.resident == set("abcde"), "nothing is done by halves"
    residency.release("c")
    admission = residency.admit("f", evict="abd")
    assert len(admission.moves) >= 1 and residency.resident == set("cef")


def test_evict_held_tensor_is_refused_as_a_whole():
    residency = Residency(4 * KIB, laid(10, 10))
    residency.admit("ab")
    residency.hold("b")
    residency.hold("b")
    residency.release("b")
    with pytest.raises(ValueError, match="b is held"):
        residency.evict("ab")
    assert residency.resident == {"a", "b"}
    residency.release("b")
    residency.evict("ab")
    assert residency.resident == frozenset()


def test_residency_misuse_is_refused():
    residency = Residency(4 * KIB, laid(10, 10))
    residency.admit("a")
    with pytest.raises(ValueError, match="a is to be evicted and needed"):
        residency.admit("a", evict="a")
    with pytest.raises(ValueError, match="not held"):
        residency.release("a")
    with pytest.raises(KeyError):
        residency.evict("b")
    with pytest.raises(KeyError):
        residency.hold("b")
    with pytest.raises(ValueError, match="-1"):
        Residency(-1, {})
