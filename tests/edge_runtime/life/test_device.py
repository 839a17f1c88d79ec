"""The device: it retries after running out of memory, and its loads overlap runs where the transfer can."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.frames.queues import Frame, Ledger, Mailboxes
from gemel.edge_runtime.frames.results import Publisher, RunIdentity
from gemel.edge_runtime.life.device import Device
from gemel.edge_runtime.life.executor import Executor
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost
from gemel.models.out_of_memory import is_out_of_memory
from tests.edge_runtime.memory.slow_transfer import SlowTransfer
from tests.edge_runtime.stub_box import ALL_BYTES, NEEDS, TENSORS, WORKSPACE, StubBox, expected_label
from tests.edge_runtime.tiny import RecordKeeper, picture, tiny_bundle

ONE_QUERY_BYTES = 512 + 1024 + WORKSPACE
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cudaErrorMemoryAllocation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("no memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
def test_device_out_of_memory_evicts_and_retries(error, caplog):
    box = StubBox().warm_up()
    assert box.arena.residency.resident == set(TENSORS)
    memory = weakref.ref(box.arena.transfer.memory)
    box.engines["a"].faults = [error]
    box.put("a")
    assert box.executor.step()
    assert box.answers() == [expected_label("a")] and box.arena.residency.resident == {"shared", "left"}
    gc.collect()
    assert memory() is None, "the device has its old memory again"
    assert box.executor.device.budget_bytes == max(ONE_QUERY_BYTES, ALL_BYTES - WORKSPACE)
    assert box.executor.device.budget_bytes == box.arena.residency.budget_bytes
    assert caplog.text.count("out of memory at query a") == 1
    for name in ("b", "c", "a"):
        box.run(name)
    assert box.answers()[1:] == [expected_label(name) for name in ("b", "c", "a")]
    assert box.arena.residency.resident_bytes + WORKSPACE <= box.executor.device.budget_bytes
    assert box.ledger.balanced and not sum(row["failed"] for row in box.ledger.to_json())


def test_device_out_of_memory_twice_fails_the_frame():
    box = StubBox().warm_up()
    box.engines["a"].faults = [OUT_OF_MEMORY[1], OUT_OF_MEMORY[0]]
    box.run("a", "b")
    assert box.answers() == [expected_label("b")]
    assert [row["failed"] for row in box.ledger.to_json()] == [1, 0, 0] and box.ledger.balanced
    assert "out of memory" in box.executor.to_json()[0]["last_failure"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        OSError("CUDA error: out of memory"),
    ],
)
def test_device_passes_other_errors_on(error):
    assert not is_out_of_memory(error)
    box = StubBox().warm_up()
    box.engines["a"].faults = [error]
    box.run("a")
    assert not box.answers() and box.executor.device.budget_bytes == ALL_BYTES


def test_unreadable_tensor_fails_one_frame():
    box = StubBox(ONE_QUERY_BYTES, slow=True)
    assert box.slow is not None
    box.engines["a"].during = lambda: box.slow.fail("the disk is gone")  # type: ignore[union-attr]
    box.run("a")
    assert not box.answers() and "the disk is gone" in box.executor.to_json()[0]["last_failure"]
    assert not any(map(box.arena.residency.holds, TENSORS))
    box.engines["a"].during = lambda: None
    box.run("a")
    assert box.answers() == [expected_label("a")] and box.ledger.balanced


def test_layers_start_as_they_arrive():
    box, arriving = StubBox(slow=True), []
    box.engines["a"].during = lambda: arriving.append(box.arena.arriving(NEEDS["a"]))
    box.run("a")
    assert arriving == [True] and box.answers() == [expected_label("a")] and not box.arena.arriving(TENSORS)
    assert box.executor.costs.queries["a"].run_s == 0.01, "a run beside its load is not measured"
    box.run("a")
    assert arriving == [True, False] and box.arena.bytes_moved == 1024


def test_next_load_is_prefetched_once():
    box, arriving = StubBox(slow=True), []
    box.engines["a"].during = lambda: arriving.append(box.arena.arriving(["right"]))
    box.put("a", "b")
    box.executor.step()
    assert arriving == [True] and box.arena.prefetches == 1 and box.arena.residency.prefetched == ("right",)
    box.executor.step()
    assert box.answers() == [expected_label("a"), expected_label("b")] and box.arena.swaps == 1
    assert box.arena.bytes_moved == sum(tensor.nbytes for tensor in TENSORS.values())
    assert box.arena.residency.prefetched == ()


def test_prefetch_needs_free_memory():
    box = StubBox(ONE_QUERY_BYTES, slow=True)
    box.run("a", "b")
    assert box.answers() == [expected_label("a"), expected_label("b")] and box.arena.prefetches == 0
    assert box.executor.device.max_used_bytes <= box.executor.device.budget_bytes


def test_engines_agree_when_streamed_or_prefetched(tmp_path):
    torch.set_num_threads(1)
    bundle = tiny_bundle(tmp_path / "tiny.safetensors")
    store = Store.of_bundle(bundle)
    sizes = {name: extent.nbytes for name, extent in store.extents.items()}
    records = {}
    for slow in (False, True):
        engines = {one.id: TorchEngine(bundle, one.id) for one in bundle.queries}
        costs = Costs(
            {
                name: QueryCost(bundle.names_in_order(name), 0.0, engine.workspace_bytes, 100.0)
                for name, engine in engines.items()
            },
            sizes,
            1e9,
        )
        budget = max(map(costs.alone_bytes, engines)) + 8 * 1024
        capacity = budget - min(engine.workspace_bytes for engine in engines.values())
        arena = Arena(store, capacity, budget_bytes=budget, transfer=SlowTransfer(store, capacity) if slow else None)
        ledger, sink = Ledger(engines), RecordKeeper()
        device = Device(arena, engines, costs, budget)
        publisher = Publisher(sink, ledger, {one.id: one for one in bundle.queries}, RunIdentity("d"))
        specs = dict.fromkeys(engines, QuerySpec(10.0))
        executor = Executor(device, policy_named("gemel"), specs, Mailboxes(engines, ledger), publisher)
        for index in range(6):
            for name in engines:
                executor.mailboxes.put(name, Frame(index, executor.clock(), 0.0, picture(index)))
            while executor.step():
                pass
        keys = ("query", "frame", "label", "score")
        records[slow] = {tuple(record[key] for key in keys) for record in sink.records}
        assert len(sink.records) == 18 and device.max_used_bytes <= budget
        assert arena.swaps > 3 and (arena.prefetches > 0) == slow
        arena.close()
    assert records[True] == records[False]
