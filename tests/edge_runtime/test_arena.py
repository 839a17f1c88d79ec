from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime import arena as arena_module
from edge_runtime.arena import Arena
from edge_runtime.costs import footprint_bytes

KIB = 1024


def stored(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: torch.arange(size, dtype=torch.int32).add(ord(name)) for name, size in sizes.items()}


def test_a_loaded_tensor_is_a_copy_in_the_arena_with_its_dtype_and_shape():
    tensors = {"f": torch.rand(3, 5), "i": torch.tensor(7), "h": torch.rand(2, 2).to(torch.bfloat16)}
    arena = Arena(tensors.__getitem__, 4 * KIB)
    assert arena.change((), ("f", "i", "h")) == 60 + 8 + 8
    for name, tensor in tensors.items():
        view = arena.tensor(name)
        assert torch.equal(view, tensor) and view.dtype == tensor.dtype and view.shape == tensor.shape
        assert view.data_ptr() % 8 == 0 and view.data_ptr() != tensor.data_ptr()
        assert view.untyped_storage().data_ptr() == arena.tensor("f").untyped_storage().data_ptr()
        assert arena.tensor(name) is view
    assert (arena.bytes_moved, arena.swaps, arena.max_resident_bytes) == (76, 1, 3 * 512)


def test_fragmentation_is_met_by_compaction_counted_apart_and_values_survive(monkeypatch):
    monkeypatch.setattr(arena_module, "BOUNCE_BYTES", 700)
    tensors = stored({"a": 128, "b": 256, "c": 128, "d": 256})
    arena = Arena(tensors.__getitem__, 2 * KIB)
    arena.change((), ("a", "b", "c"))
    before = arena.tensor("b")
    arena.change(("a", "c"), ("d",))
    assert (arena.compactions, arena.compacted_bytes, arena.bytes_moved) == (1, 1024, 4 * (128 + 256 + 128 + 256))
    assert arena.tensor("b") is not before
    assert torch.equal(arena.tensor("b"), tensors["b"]) and torch.equal(arena.tensor("d"), tensors["d"])


def test_a_full_arena_says_what_does_not_fit():
    arena = Arena(stored({"a": 256, "b": 256}).__getitem__, KIB)
    arena.change((), ("a",))
    with pytest.raises(MemoryError, match="1024 bytes of tensor b"):
        arena.change((), ("b",))


SIZES = {name: 40 * (index + 1) ** 2 for index, name in enumerate("abcdefghij")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.sampled_from(sorted(SIZES)), max_size=4), max_size=25))
def test_whatever_is_swapped_fits_when_its_bytes_do_and_reads_as_stored(wanted):
    tensors = stored(SIZES)
    arena = Arena(tensors.__getitem__, 48 * KIB)
    moved = 0
    for names in wanted:
        missing = arena.residency.missing(sorted(names))
        excess = (arena.residency.resident_bytes + sum(footprint_bytes(tensors[name].nbytes) for name in missing)
                  - arena.residency.capacity_bytes)
        evict = []
        for name in sorted(arena.residency.resident - names):
            if excess > 0:
                evict.append(name)
                excess -= footprint_bytes(tensors[name].nbytes)
        moved += sum(tensors[name].nbytes for name in missing)
        arena.change(evict, missing)
        assert arena.bytes_moved == moved
        assert names <= arena.residency.resident
        for name in arena.residency.resident:
            assert torch.equal(arena.tensor(name), tensors[name])
