"""The inference thread: it sleeps while nothing is to do, and the summary holds the reason of its end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemel.edge_runtime.life import box, executor
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.life.inference import InferenceThread
from gemel.edge_runtime.scheduler import Decision, Plan, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs
from tests.edge_runtime.life.test_executor import StubPolicy
from tests.edge_runtime.running import adds_up, total
from tests.edge_runtime.tiny import LOOPED, write_box, write_config

SERVE_S = 2.0
MAX_DECISIONS = 200
"""A loop that never sleeps decides tens of thousands of times meanwhile."""


class WaitingPolicy(StubPolicy):
    """Waits for an hour, whatever there is."""

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.decisions += 1
        self.frozen = gc.get_freeze_count()
        return Decision(wake_s=state.now + 3600)


@pytest.fixture
def serve_policy(tmp_path: Path, monkeypatch) -> Callable[[StubPolicy], dict[str, Any]]:
    """Serves two looped cameras under a policy; returns the summary."""
    write_box(tmp_path)

    def serve(policy: StubPolicy) -> dict[str, Any]:
        monkeypatch.setattr(box, "policy_named", lambda *_: policy)
        return run(write_config(tmp_path, cameras=LOOPED), seconds=SERVE_S)

    return serve


def test_inference_sleeps_until_the_named_moment(serve_policy) -> None:
    policy = WaitingPolicy()
    summary = serve_policy(policy)
    assert summary["fault"] is None and adds_up(summary) and total(summary, "received") > 0
    assert 1 <= policy.decisions < MAX_DECISIONS
    assert policy.frozen > 100_000, "a collection would walk through torch's objects while frames wait"


def test_failing_policy_ends_the_box_with_summary(serve_policy, monkeypatch) -> None:
    monkeypatch.setattr(executor, "MAX_POLICY_FAILURES", 3)
    policy = StubPolicy()
    policy.failures = 10**6
    summary = serve_policy(policy)
    assert summary["fault"].startswith("the policy stub failed 3 times in a row: ZeroDivisionError")
    assert adds_up(summary) and summary["stopped_by"] == "a fault" and total(summary, "received") > 0


def test_inference_uses_the_compute_stream() -> None:
    steps = []

    @contextmanager
    def computing() -> Iterator[None]:
        steps.append(("on", threading.current_thread().name))
        yield
        steps.append("off")

    class ShortInference(InferenceThread):
        def _warm_up(self, frames: object) -> None:
            steps.append("warm-up")

        def _loop(self, deadline: float) -> str:
            steps.append("frames")
            return "done"

    arena = SimpleNamespace(computing=computing)
    runtime = SimpleNamespace(active=SimpleNamespace(executor=SimpleNamespace(device=SimpleNamespace(arena=arena))))
    short = ShortInference(runtime, threading.Event(), lambda: False)  # type: ignore[arg-type]
    short.start({}, 1.0)
    assert short.join(60) and short.stopped_by == "done"
    assert steps == [("on", "inference"), "warm-up", "frames", "off"]


def test_loads_of_the_warm_up_count_neither_during_it_nor_after() -> None:
    arena = SimpleNamespace(bytes_moved=900, swaps=3)
    executor = SimpleNamespace(device=SimpleNamespace(arena=arena))
    runtime = SimpleNamespace(active=SimpleNamespace(executor=executor), overflow_bytes=50)
    inference = InferenceThread(runtime, threading.Event(), lambda: False)  # type: ignore[arg-type]
    assert inference.loads == {"bytes_moved": 0, "swaps": 0} and inference.overflow_bytes == 0
    inference.warm_up, inference.started = {"bytes_moved": 900, "swaps": 3}, 1.0
    arena.bytes_moved, arena.swaps = 1000, 4
    assert inference.loads == {"bytes_moved": 100, "swaps": 1}
