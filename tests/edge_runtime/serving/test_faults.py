"""Out of memory, unreadable tensors, and loads that overlap runs: what the executor makes of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from edge_runtime.device import Device
from edge_runtime.engines.base import no_op
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.executor import Executor
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from edge_runtime.policies import policy_named
from edge_runtime.queues import Frame, Ledger, Mailboxes
from edge_runtime.results import Publisher, RunIdentity
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import Costs, QueryCost
from models.device import is_out_of_memory
from models.predictions import ClassPrediction
from tests.edge_runtime.memory.slow_transfer import SlowTransfer
from tests.edge_runtime.tiny import RecordKeeper, picture, query, tiny_bundle

IMAGE = np.zeros((2, 2, 3), np.uint8)
TENSORS = {
    "shared": torch.arange(128, dtype=torch.int32),
    "left": torch.arange(128, 256, dtype=torch.int32),
    "right": torch.arange(256, 512, dtype=torch.int32),
}
NEEDS = {"a": ("shared", "left"), "b": ("shared", "right"), "c": ("left", "right")}
WORKSPACE = 1000
ALL_BYTES = 512 + 512 + 1024 + WORKSPACE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SumEngine:
    """Answers the sum of its tensors; raises what `faults` holds first."""

    workspace_bytes = WORKSPACE

    def __init__(self, query_id: str, clock: Clock, starts_early: bool = False) -> None:
        self.query, self.clock, self.starts_early = query(query_id, "left", sla_ms=100.0), clock, starts_early
        self.faults: list[Exception] = []
        self.bound: dict[str, torch.Tensor] = {}
        self.wait = None
        self.during: Callable[[], None] = lambda: None

    def bind(self, tensor_of, wait=None) -> None:
        self.bound, self.wait = {name: tensor_of(name) for name in NEEDS[self.query.id]}, wait

    def unbind(self) -> None:
        self.bound = {}

    def run(self, frames, beside=no_op) -> list:
        beside()
        self.clock.now += 0.01
        self.during()
        if self.faults:
            raise self.faults.pop(0)
        total = 0
        for name, tensor in self.bound.items():
            if self.wait is not None:
                self.wait([name])
            total += int(tensor.sum())
        return [ClassPrediction(str(total), 1.0, (1.0,))]


class Box:
    """An executor over three queries that share tensors, with everything around it real but engines and clock."""

    def __init__(self, budget: int = ALL_BYTES, slow: bool = False) -> None:
        self.clock, self.sink, store = Clock(), RecordKeeper(), Store.of_tensors(TENSORS)
        self.engines = {name: SumEngine(name, self.clock, starts_early=slow) for name in NEEDS}
        costs = Costs(
            {name: QueryCost(names, 0.01, WORKSPACE, 0.1) for name, names in NEEDS.items()},
            {name: tensor.nbytes for name, tensor in TENSORS.items()},
            1e9,
        )
        capacity = min(budget - WORKSPACE, ALL_BYTES - WORKSPACE)
        self.slow = SlowTransfer(store, capacity) if slow else None
        self.arena = Arena(store, capacity, budget_bytes=budget, transfer=self.slow)
        self.ledger = Ledger(NEEDS)
        mailboxes = Mailboxes(NEEDS, self.ledger)
        device = Device(self.arena, self.engines, costs, budget)
        publisher = Publisher(
            self.sink, self.ledger, {name: one.query for name, one in self.engines.items()}, RunIdentity("d")
        )
        demands = dict.fromkeys(NEEDS, QuerySpec(10.0))
        self.executor = Executor(device, policy_named("gemel"), demands, mailboxes, publisher, clock=self.clock)

    def put(self, *queries: str) -> None:
        for name in queries:
            self.executor.mailboxes.put(name, Frame(0, self.clock.now, 0.0, IMAGE))

    def answers(self) -> list[str]:
        return [record["label"] for record in self.sink.records]


def expected_label(query_id: str) -> str:
    return str(sum(int(TENSORS[name].sum()) for name in NEEDS[query_id]))


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cudaErrorMemoryAllocation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("no room"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
def test_device_out_of_memory_evicts_and_retries(error, caplog):
    box = Box()
    box.executor.warm_up(dict.fromkeys(NEEDS, IMAGE))
    assert box.arena.residency.resident == set(TENSORS)
    memory = weakref.ref(box.arena.transfer.memory)
    box.engines["a"].faults = [error]
    box.put("a")
    assert box.executor.step()
    assert box.answers() == [expected_label("a")] and box.arena.residency.resident == {"shared", "left"}
    gc.collect()
    assert memory() is None, "the old memory has gone back to the device"
    least = 512 + 1024 + WORKSPACE
    assert box.executor.device.budget_bytes == max(least, ALL_BYTES - WORKSPACE) == box.arena.residency.budget_bytes
    assert caplog.text.count("out of memory at query a") == 1
    for name in ("b", "c", "a"):
        box.put(name)
        assert box.executor.step()
    assert box.answers()[1:] == [expected_label(name) for name in ("b", "c", "a")]
    assert box.arena.residency.resident_bytes + WORKSPACE <= box.executor.device.budget_bytes
    assert box.ledger.balanced and not sum(account["failed"] for account in box.ledger.to_json())


def test_device_out_of_memory_twice_fails_the_frame():
    box = Box()
    box.executor.warm_up(dict.fromkeys(NEEDS, IMAGE))
    box.engines["a"].faults = [OUT_OF_MEMORY[1], OUT_OF_MEMORY[0]]
    box.put("a", "b")
    while box.executor.step():
        pass
    assert box.answers() == [expected_label("b")]
    assert [account["failed"] for account in box.ledger.to_json()] == [1, 0, 0] and box.ledger.balanced
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
    box = Box()
    box.executor.warm_up(dict.fromkeys(NEEDS, IMAGE))
    box.engines["a"].faults = [error]
    box.put("a")
    box.executor.step()
    assert not box.answers() and box.executor.device.budget_bytes == ALL_BYTES


def test_query_failing_warm_up_is_disabled():
    box = Box()
    box.engines["b"].faults = [ValueError("broken")]
    box.executor.warm_up(dict.fromkeys(NEEDS, IMAGE))
    box.put("a", "b")
    while box.executor.step():
        pass
    box.put("b")
    assert not box.executor.step()
    assert box.answers() == [expected_label("a")]
    assert [account["failed"] for account in box.ledger.to_json()] == [0, 2, 0] and box.ledger.balanced


def test_unreadable_bytes_fail_one_frame():
    box = Box(512 + 1024 + WORKSPACE, slow=True)
    box.put("a")
    assert box.slow is not None
    box.engines["a"].during = lambda: box.slow.fail("the disk is gone")  # type: ignore[union-attr]
    box.executor.step()
    assert not box.answers() and "the disk is gone" in box.executor.to_json()[0]["last_failure"]
    assert not any(map(box.arena.residency.holds, TENSORS))
    box.engines["a"].during = lambda: None
    box.put("a")
    box.executor.step()
    assert box.answers() == [expected_label("a")] and box.ledger.balanced


def test_layers_start_as_they_arrive():
    box = Box(slow=True)
    box.put("a")
    seen = []
    box.engines["a"].during = lambda: seen.append(box.arena.arriving(NEEDS["a"]))
    assert box.executor.step()
    assert seen == [True] and box.answers() == [expected_label("a")] and not box.arena.arriving(TENSORS)
    assert box.arena.bytes_moved == 1024 and box.executor.costs.queries["a"].run_s == 0.01, "it hid a load: no measure"
    box.put("a")
    box.executor.step()
    assert seen == [True, False] and box.arena.bytes_moved == 1024


def test_next_load_is_prefetched_once():
    box = Box(slow=True)
    box.put("a", "b")
    arriving = []
    box.engines["a"].during = lambda: arriving.append(box.arena.arriving(["right"]))
    box.executor.step()
    assert arriving == [True] and box.arena.prefetches == 1 and box.arena.residency.prefetched == ("right",)
    box.executor.step()
    assert box.answers() == [expected_label("a"), expected_label("b")] and box.arena.swaps == 1
    assert box.arena.bytes_moved == sum(tensor.nbytes for tensor in TENSORS.values())
    assert box.arena.residency.prefetched == ()


def test_prefetch_needs_free_memory():
    box = Box(512 + 1024 + WORKSPACE, slow=True)
    box.put("a", "b")
    while box.executor.step():
        pass
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
        demands = dict.fromkeys(engines, QuerySpec(10.0))
        executor = Executor(device, policy_named("gemel"), demands, Mailboxes(engines, ledger), publisher)
        for index in range(6):
            for name in engines:
                executor.mailboxes.put(name, Frame(index, executor.clock(), 0.0, picture(index)))
            while executor.step():
                pass
        keys = ("query", "frame", "label", "score")
        records[slow] = {tuple(record[key] for key in keys) for record in sink.records}
        assert len(sink.records) == 18 and executor.device.max_used_bytes <= budget
        assert arena.swaps > 3 and (arena.prefetches > 0) == slow
        arena.close()
    assert records[True] == records[False]
