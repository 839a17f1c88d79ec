"""What CONTRIBUTING.md says of adding: one of each kind is added here, by one registration, and works.

A kind of sink is added in tests/edge_runtime/sinks/test_registry.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call

from gemel.cli import main
from gemel.edge_runtime import policies
from gemel.edge_runtime.engines.registry import ENGINES
from gemel.edge_runtime.engines.tensor_engine import TensorEngine
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.memory.binding import TensorOf, WaitFor
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState
from gemel.merger import METHODS
from gemel.merger.checkpoint import Checkpoint, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods.registry import register_method
from gemel.models.sharing.groups import groups
from gemel.models.sharing.plan import SharingPlan
from gemel.models.zoo.registry import ENTRIES, register
from gemel.testing import check_engine, check_policy
from tests.edge_runtime.tiny import picture, tiny_bundle, write_clip, write_config, write_folder
from tests.merger.tiny import write_random_weights, write_workload

SERVED: list[str] = []


@pytest.fixture(autouse=True)
def _registries_stay_as_they_are() -> Iterator[None]:
    registries: list[dict[str, Any]] = [ENTRIES, ENGINES, METHODS, policies.POLICIES]
    before = [dict(registry) for registry in registries]
    yield
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


class Stripe(nn.Module):
    """A classifier of one convolution."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Plain(TensorEngine):
    """Calls the module with the arena's tensors."""

    name = "plain"

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        self._state = {path: tensor_of(name) for path, name in self.query.tensors.items()}

    def unbind(self) -> None:
        self._state = {}

    def forward(self, batch: Tensor) -> Any:
        SERVED.append(self.query.id)
        return functional_call(self.model, self._state, (batch,))


@dataclass(frozen=True, slots=True)
class Backwards:
    """Turns in the reverse of the order listed, one frame each."""

    name: str = "backwards"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return Plan(tuple(reversed(list(costs.queries))), dict.fromkeys(costs.queries, 1), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        return GemelPolicy().decide(state, costs, plan)


def first_group(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Ties the group that saves most, and retrains nothing."""
    plan = SharingPlan.of(groups(ctx.layers)[:1])
    return Merged(plan, snapshots(ctx.tie_models(plan, ctx.queries)))


def test_registered_zoo_model_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @register("stripe", "classification", input_size=32)
    def stripe(num_classes: int, input_size: int = 32, width: int = 4) -> nn.Module:
        return Stripe(num_classes, width)

    query = {"camera": "c", "task": "classification", "classes": ["a", "b"], "model": "stripe", "input_size": 32}
    document = {
        "name": "stripes",
        "cameras": {"c": {"source": "c.mp4"}},
        "queries": [{**query, "id": name, "weights": f"{name}.safetensors"} for name in ("left", "right")],
    }
    path = tmp_path / "workload.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in found["queries"]] == ["stripe", "stripe"]
    assert [group["members"] for group in found["groups"]] == [[["left", "body"], ["right", "body"]]]


def test_registered_engine_serves_frames(tmp_path: Path) -> None:
    ENGINES["plain"] = (__name__, "Plain")
    bundle = tiny_bundle(tmp_path / "tiny.safetensors")
    check_engine(Plain(bundle, "gate"), bundle, [picture(0), picture(1)])
    SERVED.clear()
    write_clip(tmp_path / "left.mp4", 3, fps=2.0)  # slow, so that a busy machine drops no frame
    write_folder(tmp_path / "right", 3)
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 2}}
    answers = {}
    for engine in ("plain", "torch"):
        sinks = [{"kind": "jsonl", "path": f"{engine}.jsonl"}]
        run(write_config(tmp_path, engine=engine, cameras=cameras, sinks=sinks))
        lines = map(json.loads, (tmp_path / f"{engine}.jsonl").read_text().splitlines())
        answers[engine] = {(one["query"], one["frame"]): (one["label"], one["score"]) for one in lines}
    assert set(SERVED) == {"gate", "yard", "road"}
    assert answers["plain"].keys() == answers["torch"].keys() != set()
    for key, (label, score) in answers["plain"].items():
        assert answers["torch"][key] == (label, pytest.approx(score, abs=1e-4))


def test_registered_method_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_method("first-group")(first_group)
    path = write_workload(tmp_path, frames=12)
    write_random_weights(path)
    torch.manual_seed(0)
    out = tmp_path / "box.safetensors"
    words = ["merge", str(path), "-o", str(out), "--method", "first-group", "--weights", "fp32", "--accept-unproven"]
    assert main([*words, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "first-group"
    assert 0 < found["saved_fraction"] < found["ceiling_fraction"] and out.is_file()


def test_registered_policy_drives_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies.register(Backwards())
    check_policy(Backwards(), rounds=50)
    path = write_workload(tmp_path, frames=0)
    assert main(["simulate", str(path), "--policy", "backwards", "--duration", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "backwards"
    assert all(query["processed"] > 0 for query in found["queries"])
