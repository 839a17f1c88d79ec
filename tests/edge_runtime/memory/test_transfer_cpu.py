"""Transfers by the CPU: tensors come in load order, each is waited for alone, a cancelled transfer begins no more."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from gemel.edge_runtime.memory import transfer_cpu, transfer_cuda
from gemel.edge_runtime.memory.allocator import Copy, Move, Residency
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.memory.transfer_cpu import CpuTransferBackend, allocate_memory
from gemel.edge_runtime.memory.transfer_cuda import ALLOCATOR_SLACK_BYTES, UnifiedTransferBackend
from gemel.models.bundle.format import open_file
from tests.edge_runtime.memory.fake_cuda import FakeCuda
from tests.edge_runtime.tiny import tiny_bundle

KIB = 1024


@pytest.fixture
def bundle(tmp_path):
    return tiny_bundle(tmp_path / "tiny.safetensors")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer_cpu, "PIECE_BYTES", KIB)


def store_of(sizes: dict[str, int]) -> Store:
    generator = torch.Generator().manual_seed(0)
    return Store.of_tensors(
        {name: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for name, size in sizes.items()}
    )


def copies_of(store: Store, capacity: int) -> tuple[Copy, ...]:
    return Residency(capacity, store.extents).admit(store.extents).copies


@dataclass(frozen=True, eq=False)
class HeldStore(Store):
    """Reads only what lies below where the test lets it, and fails at one place if requested."""

    fail_at: int | None = None
    read_at: set[int] = field(default_factory=set)
    limit: list[int] = field(default_factory=lambda: [0])
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def of_sizes(cls, sizes: dict[str, int], fail_at: int | None = None) -> HeldStore:
        store = store_of(sizes)
        return cls(store.extents, store.kinds, store.data, fail_at=fail_at)

    def allow(self, limit: int) -> None:
        with self.changed:
            self.limit[0] = limit
            self.changed.notify_all()

    def read(self, source: int, into: np.ndarray) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: source < self.limit[0], timeout=60)
        if source == self.fail_at:
            raise OSError("the disk is gone")
        super().read(source, into)
        self.read_at.add(source)


def test_transfer_of_one_piece_wakes_no_thread(small_pieces, monkeypatch):
    store, submitted = store_of({"a": 400, "b": 500}), []
    backend = CpuTransferBackend(store, 8 * KIB)
    monkeypatch.setattr(backend._pool, "submit", submitted.append)
    transfer = backend.start(copies_of(store, 8 * KIB), waits=True)
    transfer.finish()
    assert not submitted and transfer.missing_tensors() == set()
    backend.close()


def test_transfer_copies_in_load_order(small_pieces):
    store = HeldStore.of_sizes({"a": 700, "b": 3000, "c": 100})
    backend = CpuTransferBackend(store, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    store.allow(1024)
    transfer.wait(["a"])
    assert transfer.missing_tensors() == {"b", "c"} and store.read_at == {0}
    assert bytes(backend.memory[:700].numpy()) == bytes(store.data[:700])
    store.allow(9000)
    transfer.wait(["c", "elsewhere"])
    transfer.finish()
    assert transfer.missing_tensors() == frozenset() and store.read_at == {0, 1024, 2048, 3072, 4096}
    assert np.array_equal(backend.memory[: store.data.size].numpy(), store.data) and transfer.seconds() > 0
    backend.close()


def test_transfer_cancelled_begins_no_further_piece(small_pieces):
    store = HeldStore.of_sizes({"a": 1024, "b": 1024, "c": 1024})
    backend = CpuTransferBackend(store, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    store.allow(1024)
    transfer.wait(["a"])
    threading.Timer(0.01, store.allow, [9000]).start()
    transfer.cancel()
    assert 2048 not in store.read_at and "c" in transfer.missing_tensors() and "a" not in transfer.missing_tensors()
    with pytest.raises(OSError, match="cancelled"):
        transfer.wait(["c"])
    backend.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_transfer_read_error_fails_its_waiters_alone(small_pieces, monkeypatch, threads):
    monkeypatch.setattr(CpuTransferBackend, "threads", threads)
    store = HeldStore.of_sizes({"a": 1024, "b": 1024, "c": 1024, "d": 1024}, fail_at=2048)
    backend = CpuTransferBackend(store, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    store.allow(9000)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer.finish()
    transfer.cancel()
    assert transfer.failed and transfer.missing_tensors() == {"c", "d"}
    transfer.wait(["a", "b"])
    backend.close()


def test_compact_overlapping_moves_keep_values():
    store = store_of({"a": 6000})
    backend = CpuTransferBackend(store, 8 * KIB)
    backend.start([Copy(0, 1024, 6000, ("a",), (6000,))]).finish()
    backend.compact([Move("a", 1024, 512, 6000)])
    assert np.array_equal(backend.memory[512:6512].numpy(), store.data[:6000])
    backend.close()


def test_store_of_a_bundle_reads_as_the_bundle_even_once_it_is_replaced(bundle, tmp_path):
    store = Store.of_bundle(bundle)
    (tmp_path / "other").write_bytes(os.urandom(store.data_start))
    os.replace(tmp_path / "other", bundle.path)
    for name, (offset, nbytes) in store.extents.items():
        tensor, raw = bundle.tensor(name), np.empty(nbytes, np.uint8)
        store.read(offset, raw)
        assert raw.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert store.kinds[name] == (tensor.dtype, tuple(tensor.shape))


def test_store_of_a_truncated_file_is_an_error(bundle, tmp_path):
    store = Store.of_bundle(bundle)
    copy = tmp_path / "copy"
    copy.write_bytes(Path(bundle.path).read_bytes()[: store.data_start + 512])
    cut = Store(store.extents, store.kinds, store.data, open_file(copy, ""), store.data_start)
    last = max(store.extents.values())
    with pytest.raises(OSError, match="has become shorter"):
        cut.read(last.offset, np.empty(last.nbytes, np.uint8))


@pytest.fixture
def make_unified(bundle, monkeypatch):
    """Makes a backend of memory that a GPU shares, over the stand-in."""
    monkeypatch.setattr(transfer_cuda, "allocate_managed_memory", lambda _device, nbytes: allocate_memory(nbytes))
    return lambda cuda: UnifiedTransferBackend(Store.of_bundle(bundle), 64 * KIB, torch.device("cuda"), cuda)


def test_unified_backend_reads_from_the_file_while_the_gpu_is_idle(bundle, make_unified, small_pieces):
    cuda = FakeCuda()
    arena = Arena(Store.of_bundle(bundle), 64 * KIB, transfer=make_unified(cuda))
    for query in ("gate", "road", "yard"):
        names = bundle.names_in_order(query)
        arena.change(arena.residency.resident - set(names), names)
        assert all(torch.equal(arena.tensor(name), bundle.tensor(name)) for name in names)
    assert cuda.record == [("synchronise", "all", None)] * 3 and not arena.transfer.overlaps
    arena.transfer.release([(0, 64 * KIB)])
    assert torch.equal(arena.tensor(names[0]), bundle.tensor(names[0])), "the driver's memory stays"
    arena.close()


def test_unified_limit_is_what_the_arena_leaves(bundle, make_unified):
    store, cuda = Store.of_bundle(bundle), FakeCuda()
    arena = Arena(store, 64 * KIB, budget_bytes=100 * KIB, transfer=make_unified(cuda))
    assert cuda.allowed_bytes == 36 * KIB + ALLOCATOR_SLACK_BYTES and cuda.record == [("empty cache", "all", None)]
    arena.resize(32 * KIB, 100 * KIB)
    assert cuda.allowed_bytes == 68 * KIB + ALLOCATOR_SLACK_BYTES
    arena.take_over(arena.prepare(store, 128 * KIB, 128 * KIB, {}), store, 200 * KIB, {})
    assert cuda.allowed_bytes == 72 * KIB + ALLOCATOR_SLACK_BYTES
    arena.change((), list(store.extents))
    assert all(torch.equal(arena.tensor(name), bundle.tensor(name)) for name in store.extents)
    arena.close()
    assert cuda.allowed_bytes is None
