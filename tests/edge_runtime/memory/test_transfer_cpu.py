"""Movers: tensors come in load order, each is waited for alone, and a cancelled transfer begins nothing more."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_runtime.memory import transfer_cpu as mover_host
from edge_runtime.memory.allocator import Copy, Move
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.store import CopyReader, DirectFileReader, Store, StoreReader
from edge_runtime.memory.transfer_cpu import CpuTransferBackend, allocate_memory
from edge_runtime.memory.transfer_cuda import (
    ALLOCATOR_SLACK_BYTES,
    has_concurrent_access,
    unified_backend,
)
from models.bundle.format import open_file
from tests.edge_runtime.memory.fake_cuda import FakeCuda
from tests.edge_runtime.tiny import tiny_bundle

KIB = 1024


@pytest.fixture
def bundle(tmp_path):
    return tiny_bundle(tmp_path / "tiny.safetensors")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(mover_host, "PIECE_BYTES", KIB)


def store_of(sizes: dict[str, int]) -> Store:
    generator = torch.Generator().manual_seed(0)
    return Store.of_tensors(
        {name: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for name, size in sizes.items()}
    )


def copies_of(store: Store, capacity: int) -> tuple[Copy, ...]:
    admission = Residency(capacity, store.extents).admit(store.extents)
    assert admission is not None
    return admission.copies


def test_store_of_a_bundle_reads_as_the_bundle(bundle):
    store = Store.of_bundle(bundle)
    for name, extent in store.extents.items():
        tensor = bundle.tensor(name)
        raw = store.data[extent.offset : extent.offset + extent.nbytes]
        assert bytes(raw) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert store.kinds[name] == (tensor.dtype, tuple(tensor.shape))


class HeldReader(CopyReader):
    """Reads only what lies below where the test lets it, and fails at one place if asked."""

    def __init__(self, store: Store, fail_at: int | None = None) -> None:
        super().__init__(store)
        self.read_at, self.fail_at = set(), fail_at
        self._limit, self._changed = 0, threading.Condition()

    def allow(self, limit: int) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: source < self._limit, timeout=60)
        if source == self.fail_at:
            raise OSError("the disk is gone")
        super().read(memory, target, source, nbytes)
        self.read_at.add(source)


def test_transfer_of_one_piece_wakes_no_thread(small_pieces, monkeypatch):
    store = store_of({"a": 400, "b": 500})
    backend, asked = CpuTransferBackend.for_store(store, 8 * KIB), []
    monkeypatch.setattr(backend._pool, "submit", asked.append)
    transfer = backend.start(copies_of(store, 8 * KIB), waits=True)
    transfer.finish()
    assert not asked and transfer.missing_tensors() == set()
    backend.close()


def test_transfer_copies_in_load_order(small_pieces):
    store = store_of({"a": 700, "b": 3000, "c": 100})
    reader = HeldReader(store)
    backend = CpuTransferBackend(reader, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(1024)
    transfer.wait(["a"])
    assert transfer.missing_tensors() == {"b", "c"} and reader.read_at == {0}
    assert bytes(backend.memory[:700].numpy()) == bytes(store.data[:700])
    reader.allow(9000)
    transfer.wait(["c", "elsewhere"])
    transfer.finish()
    assert transfer.missing_tensors() == frozenset() and reader.read_at == {0, 1024, 2048, 3072, 4096}
    assert np.array_equal(backend.memory[: store.data.size].numpy(), store.data) and transfer.seconds() > 0
    backend.close()


def test_transfer_cancelled_begins_no_further_piece(small_pieces):
    store = store_of({"a": 1024, "b": 1024, "c": 1024})
    reader = HeldReader(store)
    backend = CpuTransferBackend(reader, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(1024)
    transfer.wait(["a"])
    threading.Timer(0.01, reader.allow, [9000]).start()
    transfer.cancel()
    assert 2048 not in reader.read_at and "c" in transfer.missing_tensors() and "a" not in transfer.missing_tensors()
    with pytest.raises(OSError, match="cancelled"):
        transfer.wait(["c"])
    backend.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_transfer_read_error_fails_its_waiters_alone(small_pieces, threads):
    store = store_of({"a": 1024, "b": 1024, "c": 1024, "d": 1024})
    reader = HeldReader(store, fail_at=2048)
    backend = CpuTransferBackend(reader, 8 * KIB, threads)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(9000)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer.finish()
    transfer.cancel()
    assert transfer.failed and transfer.missing_tensors() == {"c", "d"}
    transfer.wait(["a", "b"])
    backend.close()


def test_compact_overlapping_moves_keep_values():
    store = store_of({"a": 6000})
    transfer = CpuTransferBackend.for_store(store, 8 * KIB)
    transfer.start([Copy(0, 1024, 6000, ("a",), (6000,))]).finish()
    transfer.compact([Move("a", 1024, 512, 6000)])
    assert np.array_equal(transfer.memory[512:6512].numpy(), store.data[:6000])
    transfer.close()


@pytest.mark.parametrize(("direct", "concurrent"), [(True, False), (False, True)])
def test_unified_backend_reads_from_the_file(bundle, direct, concurrent, monkeypatch, small_pieces):
    if not direct:
        plain = os.preadv

        def refusing(descriptor, buffers, offset):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "the offset is not aligned")
            return plain(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", refusing)
    store = Store.of_bundle(bundle)
    idle: list[str] = []
    transfer = unified_backend(
        store,
        64 * KIB,
        torch.device("cuda"),
        allocate_memory,
        lambda: idle.append("waited"),
        lambda _: concurrent,
        FakeCuda(),
    )
    arena = Arena(store, 64 * KIB, transfer=transfer)
    for query in ("gate", "road", "yard"):
        names = bundle.names_in_order(query)
        arena.change(arena.residency.resident - set(names), names)
        for name in names:
            assert torch.equal(arena.tensor(name), bundle.tensor(name))
    assert len(idle) == 3, "the CPU touches the memory only when the GPU is idle"
    assert transfer.overlaps == concurrent
    arena.close()


def drivers_memory(capacity: int):
    """As a driver gives it: no memory of ours."""
    return allocate_memory(capacity)


def test_unified_prepare_touches_no_memory_in_use(bundle):
    store = Store.of_bundle(bundle)
    last = max(store.extents, key=lambda name: store.extents[name].offset)
    transfer = unified_backend(
        store, 64 * KIB, torch.device("cuda"), drivers_memory, lambda: None, lambda _: False, FakeCuda()
    )
    arena = Arena(store, 64 * KIB, transfer=transfer)
    arena.change((), [last])
    assert arena.residency.placement(last).offset == 0
    fresh = arena.prepare(store, 128 * KIB, 128 * KIB, 1024 * KIB, {})
    assert torch.equal(arena.tensor(last), bundle.tensor(last)), "no reader tries itself out there"
    arena.take_over(fresh, store, 1024 * KIB, {})
    arena.change((), list(store.extents))
    assert all(torch.equal(arena.tensor(name), bundle.tensor(name)) for name in store.extents)
    arena.close()


def test_unified_limit_is_what_the_arena_leaves(bundle):
    store, cuda = Store.of_bundle(bundle), FakeCuda()
    transfer = unified_backend(
        store, 64 * KIB, torch.device("cuda"), drivers_memory, lambda: None, lambda _: False, cuda
    )
    arena = Arena(store, 64 * KIB, budget_bytes=100 * KIB, transfer=transfer)
    assert cuda.allowed_bytes == 36 * KIB + ALLOCATOR_SLACK_BYTES and cuda.record == [("empty cache", "all", None)]
    arena.resize(32 * KIB, 100 * KIB)
    assert cuda.allowed_bytes == 68 * KIB + ALLOCATOR_SLACK_BYTES
    arena.take_over(arena.prepare(store, 128 * KIB, 128 * KIB, 200 * KIB, {}), store, 200 * KIB, {})
    assert cuda.allowed_bytes == 72 * KIB + ALLOCATOR_SLACK_BYTES
    arena.close()
    assert cuda.allowed_bytes is None


class Driver:
    """Answers as libcuda would."""

    def __init__(self, value: int, code: int = 0) -> None:
        self.value, self.code, self.asked = value, code, []

    def cuDeviceGet(self, ordinal, index) -> int:
        ordinal._obj.value = index.value
        return 0

    def cuDeviceGetAttribute(self, found, attribute, ordinal) -> int:
        self.asked.append((attribute.value, ordinal.value))
        found._obj.value = self.value
        return self.code


def test_concurrent_access_is_queried_from_the_driver():
    driver = Driver(1)
    assert has_concurrent_access(torch.device("cuda", 2), driver) and driver.asked == [(89, 2)]  # type: ignore[arg-type]
    assert not has_concurrent_access(torch.device("cuda"), Driver(0))  # type: ignore[arg-type]
    assert not has_concurrent_access(torch.device("cuda"), Driver(1, code=1))  # type: ignore[arg-type]


def test_store_reads_a_replaced_file_and_detects_a_truncated_one(bundle, tmp_path):
    store = Store.of_bundle(bundle)
    _, memory = allocate_memory(64 * KIB)
    reader: StoreReader = DirectFileReader(store)
    last = max(store.extents.values(), key=lambda extent: extent.offset)
    copy = tmp_path / "copy"
    copy.write_bytes(Path(bundle.path).read_bytes()[: store.data_start + 512])
    cut = Store(store.extents, store.kinds, store.data, open_file(copy, ""), store.data_start)
    shorter = DirectFileReader(cut)
    with pytest.raises(OSError, match="has become shorter"):
        shorter.read(memory, 0, last.offset, last.nbytes)
    shorter.close()
    copy.write_bytes(os.urandom(store.data_start))
    os.replace(copy, bundle.path)
    for still in (reader, DirectFileReader(store)):
        still.read(memory, 0, last.offset, last.nbytes)
        assert np.array_equal(memory[: last.nbytes], store.data[last.offset : last.offset + last.nbytes])
        still.close()
