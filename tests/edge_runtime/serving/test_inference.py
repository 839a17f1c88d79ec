"""The inference thread: it sleeps while nothing is to do, and the summary holds the reason of its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_runtime import box as fitting
from edge_runtime import executor as executing
from edge_runtime import inference
from edge_runtime.daemon import run
from edge_runtime.inference import InferenceThread
from edge_runtime.policies import policy_named
from edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs
from tests.edge_runtime.running import adds_up, total
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder

SERVES_S = 2.0
MAX_ASKED = 200
"""A loop that never sleeps asks tens of thousands of times meanwhile."""


class Policy:
    """The policy `gemel` with another `decide`; counts its calls."""

    name = "odd"

    def __init__(self) -> None:
        self._plain, self.asked = policy_named("gemel"), 0

    def view(self, costs: Costs) -> Costs:
        return self._plain.view(costs)

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return self._plain.plan(costs, specs, budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.asked += 1
        raise NotImplementedError


class Patient(Policy):
    """Waits for an hour, whatever there is."""

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.asked += 1
        return Decision(wake_s=state.now + 3600)


@pytest.fixture
def serve_policy(tmp_path: Path, monkeypatch) -> Callable[[Policy], dict[str, Any]]:
    """A box of two looped cameras that serves under this policy: its summary."""
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    looping = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}

    def serve(policy: Policy) -> dict[str, Any]:
        monkeypatch.setattr(fitting, "policy_named", lambda *_: policy)
        return run(write_config(tmp_path, cameras=looping), seconds=SERVES_S)

    return serve


def test_inference_sleeps_until_the_named_moment(serve_policy) -> None:
    policy = Patient()
    summary = serve_policy(policy)
    assert summary["fault"] is None and adds_up(summary) and total(summary, "received") > 0
    assert 1 <= policy.asked < MAX_ASKED


def test_failing_policy_ends_the_box_with_summary(serve_policy, monkeypatch) -> None:
    monkeypatch.setattr(executing, "MAX_POLICY_FAILURES", 3)
    summary = serve_policy(Policy())
    assert summary["fault"].startswith("the policy odd failed 3 times in a row: NotImplementedError")
    assert adds_up(summary) and summary["stopped_by"] == "a fault" and total(summary, "received") > 0


def test_inference_uses_the_compute_stream(monkeypatch) -> None:
    happened, device = [], object()

    @contextmanager
    def computing(where: object) -> Iterator[None]:
        happened.append(("on", where, threading.current_thread().name))
        yield
        happened.append("off")

    class Short(InferenceThread):
        def _warm_up(self, frames: object) -> None:
            happened.append("warm-up")

        def _loop(self, ends: float) -> str:
            happened.append("frames")
            return "done"

    monkeypatch.setattr(inference, "on_compute_stream", computing)
    arena = SimpleNamespace(device=device)
    runtime = SimpleNamespace(active=SimpleNamespace(executor=SimpleNamespace(device=SimpleNamespace(arena=arena))))
    short = Short(runtime, threading.Event(), lambda: False)  # type: ignore[arg-type]
    short.start({}, 1.0)
    assert short.join(60) and short.stopped_by == "done"
    assert happened == [("on", device, "inference"), "warm-up", "frames", "off"]
