"""An executor over three queries that share tensors: everything around it is real but its engines and its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gemel.edge_runtime.engines.base import no_op
from gemel.edge_runtime.frames.queues import Frame, Ledger, Mailboxes
from gemel.edge_runtime.frames.results import Publisher, RunIdentity
from gemel.edge_runtime.life.device import Device
from gemel.edge_runtime.life.executor import Executor
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import Policy, QuerySpec
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.models.predictions import ClassPrediction
from tests.edge_runtime.memory.slow_transfer import SlowTransfer
from tests.edge_runtime.tiny import RecordKeeper, query

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
    """Answers the sum of its tensors after the next of `seconds` (the last for ever); raises `faults` first."""

    workspace_bytes = WORKSPACE

    def __init__(self, query_id: str, clock: Clock, seconds: Sequence[float], starts_early: bool = False) -> None:
        self.query, self.clock, self.starts_early = query(query_id, "left", sla_ms=100.0), clock, starts_early
        self.seconds, self.batches = list(seconds), list[int]()
        self.faults: list[Exception] = []
        self.bound: dict[str, torch.Tensor] = {}
        self.wait = None
        self.during: Callable[[], object] = lambda: None

    def bind(self, tensor_of, wait=None) -> None:
        self.bound, self.wait = {name: tensor_of(name) for name in NEEDS[self.query.id]}, wait

    def unbind(self) -> None:
        self.bound = {}

    def run(self, frames, beside=no_op) -> list:
        beside()
        self.batches.append(len(frames))
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        self.during()
        if self.faults:
            raise self.faults.pop(0)
        total = 0
        for name, tensor in self.bound.items():
            if self.wait is not None:
                self.wait([name])
            total += int(tensor.sum())
        return [ClassPrediction(str(total), 1.0, (1.0,)) for _ in frames]


class StubBox:
    """The executor of some of these `queries`, by default of all, without a warm-up."""

    def __init__(
        self,
        budget: int = ALL_BYTES,
        queries: Sequence[str] = tuple(NEEDS),
        policy: Policy | str = "gemel",
        seconds: Sequence[float] = (0.01,),
        slow: bool = False,
        larger: tuple[BatchCost, ...] = (),
        fps: float = 10.0,
    ) -> None:
        self.clock, self.sink, store = Clock(), RecordKeeper(), Store.of_tensors(TENSORS)
        self.engines = {name: SumEngine(name, self.clock, seconds, starts_early=slow) for name in queries}
        used = {tensor for name in queries for tensor in NEEDS[name]}
        costs = Costs(
            {name: QueryCost(NEEDS[name], seconds[0], WORKSPACE, 0.1, larger) for name in queries},
            {name: tensor.nbytes for name, tensor in TENSORS.items() if name in used},
            1e9,
        )
        capacity = min(budget - WORKSPACE, ALL_BYTES - WORKSPACE)
        self.slow = SlowTransfer(store, capacity) if slow else None
        self.arena = Arena(store, capacity, budget_bytes=budget, transfer=self.slow)
        self.ledger = Ledger(queries)
        self.executor = Executor(
            Device(self.arena, self.engines, costs, budget),
            policy_named(policy) if isinstance(policy, str) else policy,
            dict.fromkeys(queries, QuerySpec(fps)),
            Mailboxes(queries, self.ledger),
            Publisher(self.sink, self.ledger, {name: one.query for name, one in self.engines.items()}, RunIdentity("")),
            clock=self.clock,
        )

    def warm_up(self) -> StubBox:
        self.executor.warm_up(dict.fromkeys(self.engines, IMAGE))
        return self

    def put(self, *queries: str) -> None:
        for name in queries:
            self.executor.mailboxes.put(name, Frame(0, self.clock.now, 0.0, IMAGE))

    def run(self, *queries: str) -> None:
        """A frame of each of these queries, and steps until there is nothing to do."""
        self.put(*queries)
        while self.executor.step():
            pass

    def feed(self, seconds: float) -> None:
        """A frame of every query each 0.1 s."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            start = self.clock.now
            self.run(*self.engines)
            self.clock.now = max(self.clock.now, start + 0.1)

    def counts(self, query_id: str) -> Mapping[str, Any]:
        return next(row for row in self.ledger.to_json() if row["query"] == query_id)

    def answers(self) -> list[str]:
        return [record["label"] for record in self.sink.records]


def expected_label(query_id: str) -> str:
    return str(sum(int(TENSORS[name].sum()) for name in NEEDS[query_id]))
