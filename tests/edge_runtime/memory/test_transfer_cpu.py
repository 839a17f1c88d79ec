"""Movers: tensors come in load order, each is waited for alone, and a cancelled transfer begins nothing more."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_runtime.memory import transfer_cpu as mover_host
from edge_runtime.memory import transfer_cuda as unified
from edge_runtime.memory.allocator import Copy, Move
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.store import CopyReader, DirectFileReader, Store, StoreReader
from edge_runtime.memory.transfer_cpu import CpuTransferBackend, allocate_memory
from edge_runtime.memory.transfer_cuda import (
    ALLOCATOR_SLACK_BYTES,
    allocate_managed_memory,
    has_concurrent_access,
    unified_backend,
)
from models.bundle.format import open_file
from models.device import is_out_of_memory
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


def test_the_store_of_a_bundle_reads_as_the_bundle(bundle):
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


def test_a_caller_that_waits_copies_by_itself_where_no_thread_does(small_pieces):
    store = store_of({"a": 700, "b": 3000})
    backend, busy = CpuTransferBackend.stored(store, 8 * KIB), threading.Event()
    backend._pool.submit(busy.wait)
    transfer = backend.start(copies_of(store, 8 * KIB), waits=True)
    assert transfer.lost() == {"a", "b"}, "one thread copies: the caller's"
    transfer.wait(["a"])
    assert transfer.lost() == {"b"}
    transfer.finish()
    assert np.array_equal(backend.memory[: store.data.size].numpy(), store.data)
    busy.set()
    backend.close()


def test_no_thread_is_woken_for_a_load_of_one_piece(small_pieces, monkeypatch):
    store = store_of({"a": 400, "b": 500})
    backend, asked = CpuTransferBackend.stored(store, 8 * KIB), []
    monkeypatch.setattr(backend._pool, "submit", asked.append)
    transfer = backend.start(copies_of(store, 8 * KIB), waits=True)
    transfer.finish()
    assert not asked and transfer.lost() == set()
    backend.close()


class TogetherReader(CopyReader):
    """Reads only where two read at the same time."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.threads, self._both = set(), threading.Barrier(2)

    def read(self, memory: np.ndarray, target: int, source: int, nbytes: int) -> None:
        self.threads.add(threading.get_ident())
        self._both.wait(timeout=60)
        super().read(memory, target, source, nbytes)


def test_a_thread_copies_beside_a_caller_that_waits_for_a_large_load(small_pieces):
    store = store_of({"a": 700, "b": 3000})
    reader = TogetherReader(store)
    transfer = CpuTransferBackend(reader, 8 * KIB)
    transfer.start(copies_of(store, 8 * KIB), waits=True).finish()
    assert threading.get_ident() in reader.threads and len(reader.threads) == 2
    assert np.array_equal(transfer.memory[: store.data.size].numpy(), store.data)
    transfer.close()


def test_pieces_are_copied_in_load_order_and_a_tensor_is_waited_for_alone(small_pieces):
    store = store_of({"a": 700, "b": 3000, "c": 100})
    reader = HeldReader(store)
    backend = CpuTransferBackend(reader, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(1024)
    transfer.wait(["a"])
    assert transfer.lost() == {"b", "c"} and reader.read_at == {0}
    assert bytes(backend.memory[:700].numpy()) == bytes(store.data[:700])
    reader.allow(9000)
    transfer.wait(["c", "elsewhere"])
    transfer.finish()
    assert transfer.lost() == frozenset() and reader.read_at == {0, 1024, 2048, 3072, 4096}
    assert np.array_equal(backend.memory[: store.data.size].numpy(), store.data) and transfer.seconds() > 0
    backend.close()


def test_a_cancelled_transfer_begins_no_further_piece(small_pieces):
    store = store_of({"a": 1024, "b": 1024, "c": 1024})
    reader = HeldReader(store)
    backend = CpuTransferBackend(reader, 8 * KIB)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(1024)
    transfer.wait(["a"])
    threading.Timer(0.01, reader.allow, [9000]).start()
    transfer.cancel()
    assert 2048 not in reader.read_at and "c" in transfer.lost() and "a" not in transfer.lost()
    with pytest.raises(OSError, match="cancelled"):
        transfer.wait(["c"])
    backend.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_that_cannot_be_read_fail_those_who_wait_for_them_alone(small_pieces, threads):
    store = store_of({"a": 1024, "b": 1024, "c": 1024, "d": 1024})
    reader = HeldReader(store, fail_at=2048)
    backend = CpuTransferBackend(reader, 8 * KIB, threads)
    transfer = backend.start(copies_of(store, 8 * KIB))
    reader.allow(9000)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer.finish()
    transfer.cancel()
    assert transfer.failed and transfer.lost() == {"c", "d"}
    transfer.wait(["a", "b"])
    backend.close()


def test_moves_towards_the_start_may_overlap():
    store = store_of({"a": 6000})
    transfer = CpuTransferBackend.stored(store, 8 * KIB)
    transfer.start([Copy(0, 1024, 6000, ("a",), (6000,))]).finish()
    transfer.compact([Move("a", 1024, 512, 6000)])
    assert np.array_equal(transfer.memory[512:6512].numpy(), store.data[:6000])
    transfer.close()


@pytest.mark.parametrize(("direct", "concurrent"), [(True, False), (False, True)])
def test_unified_memory_is_filled_from_the_file_over_ordinary_memory(
    bundle, direct, concurrent, monkeypatch, small_pieces
):
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


def test_what_is_made_ready_while_a_box_serves_touches_none_of_the_memory_that_kernels_read(bundle):
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


def test_a_drivers_memory_is_not_given_back_page_by_page():
    store = store_of({"a": 16 * KIB})
    transfer = CpuTransferBackend(CopyReader(store), 16 * KIB, allocate=drivers_memory)
    transfer.start(copies_of(store, 16 * KIB)).finish()
    transfer.release([(0, 16 * KIB)])
    assert np.array_equal(transfer.memory.numpy(), store.data), "its pages would be lost to the driver, too"
    transfer.close()


def test_where_arena_and_allocator_share_one_memory_the_allocator_has_what_the_budget_leaves(bundle):
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


def drivers_memory(capacity_bytes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Stands for what only a driver can take and free."""
    return allocate_memory(capacity_bytes)


def test_managed_memory_is_not_written_to_as_it_is_taken(monkeypatch):
    there = (ctypes.c_ubyte * 64)(*range(64))

    class Libcuda:
        def cuMemAllocManaged(self, pointer, nbytes, flags) -> int:
            pointer._obj.value = ctypes.addressof(there)
            return 0 if (nbytes.value, flags.value) == (64, 1) else nbytes.value - 63

        def cuMemFree_v2(self, _pointer) -> int:
            return 0

    monkeypatch.setattr(unified.ctypes, "CDLL", lambda _name: Libcuda())
    monkeypatch.setattr(torch, "as_tensor", lambda region, device: torch.frombuffer(there, dtype=torch.uint8))
    memory, array = allocate_managed_memory(torch.device("cpu"), 64)
    assert memory.tolist() == array.tolist() == list(range(64)), "a kernel may be running"
    array[3] = 77
    assert memory[3] == 77
    for nbytes, lacking in ((65, True), (66, False)):
        with pytest.raises(RuntimeError, match=f"gave no {nbytes} bytes") as raised:
            allocate_managed_memory(torch.device("cpu"), nbytes)
        assert is_out_of_memory(raised.value) == lacking


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


def test_the_driver_is_asked_whether_both_may_touch_managed_memory_at_once():
    driver = Driver(1)
    assert has_concurrent_access(torch.device("cuda", 2), driver) and driver.asked == [(89, 2)]  # type: ignore[arg-type]
    assert not has_concurrent_access(torch.device("cuda"), Driver(0))  # type: ignore[arg-type]
    assert not has_concurrent_access(torch.device("cuda"), Driver(1, code=1))  # type: ignore[arg-type]


def test_a_file_that_was_replaced_is_read_on_and_one_that_was_cut_is_noticed(bundle, tmp_path):
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
