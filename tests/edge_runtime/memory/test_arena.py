"""The arena: what is loaded reads as stored wherever it lies, and whatever fits by its bytes fits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from tests.edge_runtime.memory.slow_transfer import SlowTransfer

KIB = 1024


def make_tensors(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: torch.arange(size, dtype=torch.int32).add(ord(name)) for name, size in sizes.items()}


def arena_of(tensors: dict[str, torch.Tensor], capacity: int) -> Arena:
    return Arena(Store.of_tensors(tensors), capacity)


def slow_arena(tensors: dict[str, torch.Tensor], capacity: int) -> tuple[Arena, SlowTransfer]:
    """An arena whose copies happen one by one, when the test says so."""
    store = Store.of_tensors(tensors)
    transfer = SlowTransfer(store, capacity)
    return Arena(store, capacity, transfer=transfer), transfer


def test_arena_loaded_tensor_has_its_dtype_and_shape():
    tensors = {"f": torch.rand(3, 5), "i": torch.tensor(7), "h": torch.rand(2, 2).to(torch.bfloat16)}
    arena = arena_of(tensors, 4 * KIB)
    assert arena.change((), ("f", "i", "h")) == 60 + 8 + 8
    for name, tensor in tensors.items():
        view = arena.tensor(name)
        assert torch.equal(view, tensor) and view.dtype == tensor.dtype and view.shape == tensor.shape
        assert view.data_ptr() % 512 == 0 and view.data_ptr() != tensor.data_ptr()
        assert view.untyped_storage().data_ptr() == arena.tensor("f").untyped_storage().data_ptr()
        assert arena.tensor(name) is view
    assert (arena.bytes_moved, arena.swaps, arena.max_resident_bytes) == (76, 1, 3 * 512)


def test_arena_compaction_keeps_values():
    tensors = make_tensors({"a": 128, "b": 256, "c": 128, "d": 256})
    arena = arena_of(tensors, 2 * KIB)
    arena.change((), ("a", "b", "c"))
    before = arena.tensor("b")
    arena.change(("a", "c"), ("d",))
    assert (arena.compactions, arena.compacted_bytes, arena.bytes_moved) == (1, 1024, 4 * (128 + 256 + 128 + 256))
    assert arena.tensor("b") is not before
    assert torch.equal(arena.tensor("b"), tensors["b"]) and torch.equal(arena.tensor("d"), tensors["d"])


SIZES = {name: 40 * (index + 1) ** 2 for index, name in enumerate("abcdefghij")}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from(sorted(SIZES)), max_size=4), st.sets(st.sampled_from(sorted(SIZES)), max_size=3)
        ),
        max_size=25,
    )
)
def test_arena_under_any_swapping_reads_as_stored(turns):
    tensors = make_tensors(SIZES)
    arena = arena_of(tensors, 48 * KIB)
    for names, following in turns:
        missing = arena.residency.missing(sorted(names))
        nobodys = set(arena.residency.prefetched) - names
        excess = (
            arena.residency.resident_bytes
            + sum(footprint_bytes(tensors[name].nbytes) for name in missing)
            - sum(footprint_bytes(tensors[name].nbytes) for name in nobodys)
            - arena.residency.capacity_bytes
        )
        evict = []
        for name in sorted(arena.residency.resident - names - nobodys):
            if excess > 0:
                evict.append(name)
                excess -= footprint_bytes(tensors[name].nbytes)
        arena.start(sorted(names), 0, evict)
        arena.prefetch(sorted(following))
        arena.finish(names)
        assert names <= arena.residency.resident
        for name in names:
            assert torch.equal(arena.tensor(name), tensors[name])
    arena.finish()
    for name in arena.residency.resident:
        assert torch.equal(arena.tensor(name), tensors[name])
    arena.close()


def test_arena_needed_prefetch_continues():
    tensors = make_tensors({"a": 128, "b": 128, "c": 128})
    arena, transfer = slow_arena(tensors, 4 * KIB)
    assert arena.prefetch("bc") and transfer.arrive(1) == ["b"]
    assert not arena.start("bc") and arena.arriving("c") and not transfer.cancelled
    assert transfer.arrive(1) == ["c"]
    arena.finish("bc")
    assert (arena.bytes_moved, arena.swaps, arena.prefetches) == (1024, 0, 1) and not arena.arriving("bc")
    assert torch.equal(arena.tensor("c"), tensors["c"])


def test_arena_cancelled_prefetch_counts_what_arrived():
    tensors = make_tensors({"a": 128, "b": 128, "c": 128, "d": 256})
    arena, transfer = slow_arena(tensors, 4 * 512)
    arena.prefetch("abc")
    transfer.arrive(1)
    assert arena.start("d") and transfer.cancelled == 1
    assert arena.residency.resident == {"a", "d"} and arena.residency.prefetched == ("a",)
    transfer.arrive(1)
    arena.finish()
    assert arena.bytes_moved == 512 + 1024 and torch.equal(arena.tensor("d"), tensors["d"])
    assert torch.equal(arena.tensor("a"), tensors["a"])


def test_arena_prefetch_evicts_nothing_held_or_arriving():
    arena, transfer = slow_arena(make_tensors({"a": 128, "b": 128, "c": 128}), 2 * 512)
    arena.start("a")
    transfer.arrive(1)
    arena.finish()
    arena.residency.hold("a")
    assert not arena.prefetch("bc", evict="a") and arena.residency.resident == {"a"}
    assert arena.prefetch("b") and not arena.prefetch("c", evict="b")
    assert arena.residency.resident == {"a", "b"}


def test_arena_failed_load_is_read_again():
    tensors = make_tensors({"a": 128, "b": 128})
    arena, transfer = slow_arena(tensors, 4 * KIB)
    arena.start("ab")
    transfer.arrive(1)
    transfer.fail("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        arena.finish("ab")
    assert arena.residency.resident == {"a"} and arena.bytes_moved == 512
    arena.start("ab")
    transfer.arrive(1)
    arena.finish()
    assert arena.bytes_moved == 1024 and torch.equal(arena.tensor("b"), tensors["b"])


class Recorder:
    """An engine that notes what it was bound to."""

    def __init__(self, names: str) -> None:
        self.names, self.starts_early, self.times, self.tensors, self.wait = names, True, 0, {}, None

    def bind(self, tensor_of, wait=None) -> None:
        self.times += 1
        self.tensors, self.wait = {name: tensor_of(name) for name in self.names}, wait


def test_arena_rebinds_only_after_a_placement():
    tensors = make_tensors({"a": 128, "b": 128, "c": 256})
    arena, transfer = slow_arena(tensors, 3 * 512)
    engine = Recorder("ab")
    arena.start("ab")
    arena.bind(engine, "ab")  # type: ignore[arg-type]
    assert engine.wait is not None, "its tensors are arriving"
    arena.finish("ab")
    for _ in range(3):
        arena.start("ab")
        arena.bind(engine, "ab")  # type: ignore[arg-type]
    assert engine.times == 2 and engine.wait is None
    arena.change("a", "")
    arena.start("ca", evict="b")
    arena.finish()
    arena.start("ab", evict="c")
    transfer.arrive(1)
    arena.bind(engine, "ab")  # type: ignore[arg-type]
    arena.finish()
    assert engine.times == 3
    for name in "ab":
        assert engine.tensors[name] is arena.tensor(name) and torch.equal(arena.tensor(name), tensors[name])


def test_arena_resized_frees_its_memory():
    tensors = make_tensors({"a": 128, "b": 128})
    arena = arena_of(tensors, 4 * KIB)
    arena.change((), "ab")
    before = weakref.ref(arena.transfer.memory)
    with pytest.raises(ValueError, match="while a query runs"):
        arena.residency.hold("a")
        arena.resize(KIB, KIB)
    arena.residency.release("a")
    arena.resize(KIB, 2 * KIB)
    gc.collect()
    assert before() is None and arena.residency.resident == frozenset()
    assert (arena.residency.capacity_bytes, arena.residency.budget_bytes) == (KIB, 2 * KIB)
    arena.change((), "ab")
    assert torch.equal(arena.tensor("b"), tensors["b"])


def test_arena_releases_free_pages_for_a_large_workspace():
    mib = 2**20
    tensors = make_tensors({"a": 8 * mib, "b": 8 * mib})  # 32 MiB each
    arena = Arena(Store.of_tensors(tensors), 64 * mib, budget_bytes=70 * mib)
    arena.start(("a", "b"), workspace_bytes=4 * mib)
    arena.finish()
    full = resident_bytes()
    arena.start(("b",), workspace_bytes=4 * mib, evict=("a",))
    assert resident_bytes() > full - mib  # the range and this workspace fit the budget together
    arena.start(("b",), workspace_bytes=36 * mib)
    assert resident_bytes() < full - 30 * mib
    assert torch.equal(arena.tensor("b"), tensors["b"])
    arena.change(("b",), ("a",))
    assert torch.equal(arena.tensor("a"), tensors["a"])


def resident_bytes() -> int:
    """Memory of this process, files it maps left out."""
    found = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(found["Anonymous:"])
