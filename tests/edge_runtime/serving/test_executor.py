"""The executor: what it learns of run times in the warm-up and while it serves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_runtime.device import Device
from edge_runtime.engines.base import no_op
from edge_runtime.executor import Executor
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from edge_runtime.policies import policy_named
from edge_runtime.queues import Frame, Ledger, Mailboxes
from edge_runtime.results import Publisher, RunIdentity
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from models.predictions import ClassPrediction
from tests.edge_runtime.tiny import RecordKeeper, query

IMAGE = np.zeros((2, 2, 3), np.uint8)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowEngine:
    """Takes the next of `seconds` for each run; the last for ever."""

    workspace_bytes = 0
    starts_early = False

    def __init__(self, query_id: str, clock: Clock, seconds: list[float]) -> None:
        self.query, self.clock, self.seconds, self.runs = query(query_id, "left", sla_ms=100.0), clock, seconds, 0
        self.batches: list[int] = []

    def bind(self, tensor_of, wait=None) -> None:
        self.bound = tensor_of(self.query.id)

    def unbind(self) -> None:
        self.bound = None

    def run(self, frames, beside=no_op) -> list:
        beside()
        self.runs += 1
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        self.batches.append(len(frames))
        return [ClassPrediction("a", 1.0, (1.0,)) for _ in frames]


def one_query(
    seconds: list[float], larger: tuple[BatchCost, ...] = (), fps: float = 10.0
) -> tuple[Executor, SlowEngine, Clock]:
    clock = Clock()
    engine = SlowEngine("q", clock, seconds)
    run_s = seconds[0] if larger and larger[0].run_s else 0.0
    costs = Costs({"q": QueryCost(("q",), run_s, 0, 0.1, larger)}, {"q": 400}, 1e12)
    ledger = Ledger(["q"])
    arena = Arena(Store.of_tensors({"q": torch.arange(100, dtype=torch.int32)}), 1024)
    device = Device(arena, {"q": engine}, costs, 1024)
    publisher = Publisher(RecordKeeper(), ledger, {"q": engine.query}, RunIdentity("d"))
    mailboxes = Mailboxes(["q"], ledger)
    executor = Executor(device, policy_named("adaptive"), {"q": QuerySpec(fps)}, mailboxes, publisher, clock=clock)
    executor.warm_up({"q": IMAGE})
    return executor, engine, clock


def feed(executor: Executor, clock: Clock, frames: int) -> list[bool]:
    """One fresh frame and one step after another; whether each was run."""
    ran = []
    for index in range(frames):
        executor.mailboxes.put("q", Frame(index, clock.now, 0.0, IMAGE))
        ran.append(executor.step())
        clock.now += 0.001
    return ran


def test_warm_up_measures_best_later_run():
    executor, engine, _ = one_query([1.0, 0.03, 0.02, 0.5])
    assert engine.runs == 3
    assert executor.costs.queries["q"].run_s == pytest.approx(0.02)
    assert engine.bound is not None and torch.equal(engine.bound, torch.arange(100))
    assert executor.device.arena.residency.resident == {"q"}


def test_executor_estimates_follow_measurements():
    executor, _, clock = one_query([0.02, 0.02, 0.02, 0.04])
    assert all(feed(executor, clock, 30))
    assert executor.costs.queries["q"].run_s == pytest.approx(0.04, rel=0.01)
    assert executor.to_json()[0]["age_p95_ms"] == pytest.approx(40)


@pytest.mark.parametrize("stalls", [[0.02, 0.02, 0.02, 5.0, 0.02], [5.0, 5.0, 5.0, 0.02]])
def test_executor_recovers_from_a_stall(stalls):
    executor, _, clock = one_query(stalls)
    ran = feed(executor, clock, 300)
    assert not all(ran[:50]) and all(ran[-30:])
    assert executor.publisher.ledger.balanced


def test_executor_retries_too_slow_query():
    executor, _, clock = one_query([0.15])
    feed(executor, clock, 200)
    account = executor.publisher.ledger.to_json()[0]
    assert 3 < account["processed"] == account["late"] < 60
    assert account["dropped"] == {"deadline": 200 - account["processed"]}


def two_frames(larger: tuple[BatchCost, ...]) -> SlowEngine:
    """What became of two frames that waited together, beside room for a batch."""
    executor, engine, clock = one_query([0.02], larger, fps=80.0)
    engine.batches.clear()
    for captured_at in (0.0, 0.001):
        executor.mailboxes.put("q", Frame(0, clock.now + captured_at, 0.0, IMAGE))
    clock.now += 0.001
    while executor.step():
        pass
    assert executor.publisher.ledger.to_json()[0]["processed"] == 2 and executor.publisher.ledger.balanced
    return engine


def test_executor_batches_waiting_frames():
    assert two_frames((BatchCost(2, 0.0, 0),)).batches == [1, 1], "as far as is known a batch brings nothing"
    assert two_frames((BatchCost(2, 0.022, 0),)).batches == [2]
