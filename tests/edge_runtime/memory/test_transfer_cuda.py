"""The transfer of a GPU, over a stand-in: what waits for what, what is pinned, how weights lie, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gemel.edge_runtime.memory import transfer_cuda as transfer_cuda
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store, channels_last_layouts
from gemel.edge_runtime.memory.transfer import compute_stream, on_compute_stream
from gemel.edge_runtime.memory.transfer_cuda import ALLOCATOR_SLACK_BYTES, CudaTransferBackend
from tests.edge_runtime.memory.fake_cuda import FakeCuda, FakeStream, Kernels
from tests.edge_runtime.memory.test_transfer_cpu import store_of

KIB = 1024


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer_cuda, "COPY_BYTES", KIB)


def cuda_arena(sizes: dict[str, int], capacity: int, cuda: FakeCuda) -> Arena:
    store = store_of(sizes)
    return Arena(store, capacity, transfer=CudaTransferBackend(store, capacity, torch.device("cpu"), cuda))


def test_cuda_compute_waits_for_a_layers_last_copy_once(small_pieces):
    cuda = FakeCuda()
    arena = cuda_arena({"a": 700, "b": 3000, "c": 100}, 8 * KIB, cuda)
    arena.start("abc")
    events = [what for what in cuda.record if what[0] == "event"]
    assert events == [("event", "copy", index) for index in range(7)], (
        "one before, one after each of five copies, one at the end"
    )
    cuda.record.clear()
    for name in "abcba":
        arena.wait(name)
    assert cuda.record == [("wait", "compute", 1), ("wait", "compute", 4), ("wait", "compute", 5)]
    cuda.record.clear()
    arena.finish()
    assert ("wait", "host", 6) in cuda.record and arena.load_s == 2.0 and arena.bytes_moved == 3800
    for name in "abc":
        extent = arena.store.extents[name]
        assert np.array_equal(
            arena.tensor(name).numpy(), arena.store.data[extent.offset : extent.offset + extent.nbytes]
        )


def test_cuda_compaction_uses_a_bounce_buffer(monkeypatch):
    monkeypatch.setattr(transfer_cuda, "BOUNCE_BYTES", 700)
    cuda = FakeCuda()
    arena = cuda_arena({"a": 512, "b": 3000, "c": 512, "d": 1024}, 4096, cuda)
    arena.change((), "abc")
    cuda.record.clear()
    arena.change("ac", "d")
    assert arena.compactions == 1 and ("synchronise", "copy", None) in cuda.record
    extent = arena.store.extents["b"]
    assert np.array_equal(arena.tensor("b").numpy(), arena.store.data[extent.offset : extent.offset + extent.nbytes])


def test_cuda_bundle_is_pinned_once_and_unpinned():
    cuda = FakeCuda()
    arena = cuda_arena({"a": 512}, KIB, cuda)
    assert len(cuda.pinned) == 1
    arena.resize(512, 512)
    assert cuda.record[-2:] == [("synchronise", "all", None), ("empty cache", "all", None)]
    arena.close()
    arena.close()
    assert not cuda.pinned


def test_cuda_unpinnable_memory_costs_a_warning(caplog):
    cuda = FakeCuda(pin_code=2)
    with Kernels(cuda):
        arena = cuda_arena({"a": 512}, KIB, cuda)
        assert not cuda.pending, "the next kernel would raise it"
        assert "could not be pinned" in caplog.text and arena.change((), "a") == 512
    arena.close()
    assert not cuda.pinned, "what was never registered is not unregistered either"


def test_cuda_loads_wait_for_the_compute_stream():
    cuda = FakeCuda()
    with Kernels(cuda):
        arena = cuda_arena({"a": 512, "b": 3000, "c": 512, "d": 1024}, 4096, cuda)
        cuda.record.clear()
        arena.start("abc")
        assert [what for what in cuda.record if what[0] in ("behind compute", "copy_")] == [
            ("behind compute", "copy", None),
            ("copy_", "copy", None),
        ]
        arena.finish()
        cuda.record.clear()
        arena.change("ac", "d")
    assert arena.compactions == 1
    before = cuda.record.index(("behind compute", "copy", None))
    assert before < cuda.record.index(("clone", "copy", None)), "compaction moves what a kernel may be arranging"


def test_pinned_store_reorders_once_and_back():
    cuda, weight = FakeCuda(), torch.rand(4, 3, 2, 2)
    store = Store.of_tensors({"w": weight, "v": torch.rand(700)})
    layouts = channels_last_layouts(store.kinds)
    arena = Arena(
        store, 8 * KIB, transfer=CudaTransferBackend(store, 8 * KIB, torch.device("cpu"), cuda), layouts=layouts
    )
    with Kernels(cuda):
        cuda.record.clear()
        arena.change((), ["w", "v"])
        assert {stream for what, stream, _ in cuda.record if what == "copy_"} == {"copy"}, "nothing is arranged there"
    for _ in range(2):
        assert torch.equal(arena.tensor("w"), weight)
        assert arena.tensor("w").is_contiguous(memory_format=torch.channels_last)
        arena.resize(8 * KIB, 8 * KIB, layouts)
        arena.change((), ["w", "v"])
    arena.resize(8 * KIB, 8 * KIB, {})
    arena.change((), ["w", "v"])
    assert torch.equal(arena.tensor("w"), weight) and arena.tensor("w").is_contiguous()


def test_pinned_store_reorders_shared_bytes_once():
    weight = torch.rand(4, 3, 2, 2)
    store = Store.of_tensors({"w": weight})
    names = ["w@a", "w@b"]
    store = Store(dict.fromkeys(names, store.extents["w"]), dict.fromkeys(names, store.kinds["w"]), store.data)
    arena = Arena(
        store,
        8 * KIB,
        transfer=CudaTransferBackend(store, 8 * KIB, torch.device("cpu"), FakeCuda()),
        layouts=channels_last_layouts(store.kinds),
    )
    arena.change((), names)
    assert torch.equal(arena.tensor("w@a"), weight) and torch.equal(arena.tensor("w@b"), weight)


def test_cuda_allocator_limit_follows_the_budget():
    cuda, store = FakeCuda(), store_of({"a": 512})
    arena = Arena(store, KIB, budget_bytes=8 * KIB, transfer=CudaTransferBackend(store, KIB, torch.device("cpu"), cuda))
    assert cuda.allowed_bytes == 8 * KIB + ALLOCATOR_SLACK_BYTES
    assert cuda.record == [("empty cache", "all", None)], "what was kept from before would come on top"
    arena.resize(KIB, 4 * KIB)
    assert cuda.allowed_bytes == 4 * KIB + ALLOCATOR_SLACK_BYTES
    other = store_of({"b": 900})
    arena.take_over(arena.prepare(other, 2 * KIB, 2 * KIB, {}), other, 16 * KIB, {})
    assert cuda.allowed_bytes == 16 * KIB + ALLOCATOR_SLACK_BYTES
    arena.close()
    assert cuda.allowed_bytes is None


def test_compute_stream_is_ordered_with_the_callers():
    cuda, device = FakeCuda(), torch.device("cuda", 0)
    cuda.active = default = FakeStream(cuda, "default")
    stream = compute_stream(device, cuda)
    assert stream is compute_stream(device, cuda) and stream.cuda_stream, "0 would mean that none was given"
    assert stream is compute_stream(torch.device("cuda"), cuda) is not compute_stream(torch.device("cuda", 1), cuda)
    with on_compute_stream(device, cuda):
        assert cuda.active is stream
        before = list(cuda.record)
        with on_compute_stream(device, cuda):
            assert cuda.active is stream
        assert cuda.record == before == [("behind default", stream.name, None)]
    assert cuda.active is default and cuda.record[-1] == (f"behind {stream.name}", "default", None)
    with on_compute_stream(torch.device("cpu"), cuda):
        assert cuda.active is default
