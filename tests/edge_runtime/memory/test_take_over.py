"""An arena goes over to another bundle: what both have stays, and is not read again."""

from __future__ import annotations

import pytest
import torch

from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.memory.transfer_cuda import CudaTransferBackend
from tests.edge_runtime.memory.fake_cuda import FakeCuda

PAGE = 512


def store_of(**sizes: int) -> Store:
    """Tensors whose values say their name."""
    return Store.of_tensors({name: torch.full((size,), ord(name), dtype=torch.uint8) for name, size in sizes.items()})


def arena_of(store: Store, capacity: int, kind: str) -> Arena:
    transfer = CudaTransferBackend(store, capacity, torch.device("cpu"), FakeCuda()) if kind == "cuda" else None
    return Arena(store, capacity, transfer=transfer)


def reads_as_stored(arena: Arena, names: str) -> bool:
    return all(bool((arena.tensor(name) == ord(name)).all()) for name in names)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("capacity", [8 * PAGE, 4 * PAGE])
def test_take_over_keeps_common_tensors(kind, capacity):
    arena = arena_of(store_of(a=700, b=900, c=300), 5 * PAGE, kind)
    arena.change((), ["a", "b", "c"])
    other, moved = store_of(d=500, c=300, a=700), arena.bytes_moved
    arena.take_over(arena.prepare(other, capacity, 8 * PAGE, {}), other, 100 * PAGE, {})
    assert arena.residency.resident == {"a", "c"} and reads_as_stored(arena, "ac")
    assert arena.residency.resident_bytes == 3 * PAGE
    arena.change((), ["a", "c", "d"])
    assert arena.bytes_moved - moved == 500 and reads_as_stored(arena, "acd")
    arena.change("c", [])
    arena.change((), ["c"])
    assert reads_as_stored(arena, "c"), "and it is read out of the other bundle"
    assert arena.residency.capacity_bytes == max(capacity, 5 * PAGE)
    arena.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_take_over_without_memory_for_both_keeps_nothing(kind):
    arena, other = arena_of(store_of(a=700), 2 * PAGE, kind), store_of(a=700, b=900)
    arena.change((), ["a"])
    arena.take_over(arena.prepare(other, 4 * PAGE, 5 * PAGE, {}), other, 5 * PAGE, {})
    assert not arena.residency.resident and arena.residency.capacity_bytes == 4 * PAGE
    arena.change((), ["a", "b"])
    assert reads_as_stored(arena, "ab")


def test_take_over_reads_tensors_of_another_format_again():
    weight = torch.rand(4, 3, 2, 2)
    store = Store.of_tensors({"w": weight, "v": torch.ones(3)})
    arena = Arena(store, 8 * PAGE)
    arena.change((), ["w", "v"])
    arena.take_over(arena.prepare(store, 8 * PAGE, 8 * PAGE, {"w"}), store, 8 * PAGE, {"w"})
    assert arena.residency.resident == {"v"}
    arena.change((), ["w"])
    assert torch.equal(arena.tensor("w"), weight)


def test_dropped_source_is_unpinned():
    cuda, store = FakeCuda(), store_of(a=700)
    arena = Arena(store, 2 * PAGE, transfer=CudaTransferBackend(store, 2 * PAGE, torch.device("cpu"), cuda))
    staged = arena.prepare(store_of(b=900), 2 * PAGE, 2 * PAGE, {})
    assert len(cuda.pinned) == 2
    arena.transfer.drop(staged.source)
    assert len(cuda.pinned) == 1
