"""What CONTRIBUTING.md says of adding: one of each kind is here as a stranger's package has it, and works.

A kind of sink is added in tests/edge_runtime/sinks/test_registry.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.func import functional_call

from gemel.cli import main
from gemel.edge_runtime.engines.tensor_engine import TensorEngine
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.memory.binding import TensorOf, WaitFor
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState
from gemel.merger.checkpoint import Checkpoint, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods.registry import Method
from gemel.models.bundle import Bundle, Made, write_bundle
from gemel.models.decoders import choose_decoder
from gemel.models.decoders.decoder import Decoder, GraphHead, Output
from gemel.models.predictions import ClassPrediction
from gemel.models.preprocess import Size
from gemel.models.sharing.groups import groups
from gemel.models.sharing.plan import SharingPlan
from gemel.models.tasks.classification import Classification
from gemel.models.zoo.registry import ENTRIES, register
from gemel.testing import check_decoder, check_engine, check_policy, check_task
from tests.distributions import install
from tests.edge_runtime.tiny import picture, tiny_bundle, trained_looking, write_clip, write_config, write_folder
from tests.edge_runtime.tiny import query as tiny_query
from tests.merger.tiny import write_random_weights, write_workload

SERVED: list[str] = []


@pytest.fixture(autouse=True)
def _stranger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution whose code is this file."""
    added = {
        "engines": Plain, "policies": Backwards, "methods": FirstGroups, "decoders": Columns, "tasks": Parity,
    }  # fmt: skip
    groups = {f"gemel.{group}": {one.name: f"{__name__}:{one.__name__}"} for group, one in added.items()}
    install(tmp_path_factory.mktemp("site"), monkeypatch, "gemel-more", groups)
    yield
    ENTRIES.pop("stripe", None)


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
    options: ClassVar = {"mark": str}

    def __init__(self, bundle: Bundle, query_id: str, device: Any = "cpu", mark: str = "") -> None:
        super().__init__(bundle, query_id, device)
        self._mark = mark

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        self._state = {path: tensor_of(name) for path, name in self.query.tensors.items()}

    def unbind(self) -> None:
        self._state = {}

    def forward(self, batch: Tensor) -> Any:
        SERVED.append(self._mark + self.query.id)
        return functional_call(self.model, self._state, (batch,))


@dataclass(frozen=True)
class Backwards:
    """Turns in the reverse of the order listed."""

    name = "backwards"
    frames: int = 1

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return Plan(tuple(reversed(list(costs.queries))), dict.fromkeys(costs.queries, self.frames), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        return GemelPolicy().decide(state, costs, plan)


@dataclass(frozen=True)
class FirstGroups(Method):
    """Ties the groups that save most, and retrains nothing."""

    name = "first-groups"
    count: int = 1

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        plan = SharingPlan.of(groups(ctx.layers)[: self.count])
        return Merged(plan, snapshots(ctx.tie_models(plan, ctx.queries)))


@dataclass(frozen=True)
class Columns(Decoder):
    """Rows of a box in fractions of the input, and scores."""

    name = "columns"
    width: int = 2

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        return [cls(head.outputs[0].shape[-1] - 4)] if head.outputs[0].shape == (9, 6) else []

    def decode(self, outputs: Sequence[Any], size: Size, rows: Any = slice(None)) -> Any:
        return outputs[0][:, rows, :4], outputs[0][:, rows, 4:]


class Parity(Classification):
    """Whether the place of the likeliest class is even."""

    name = "parity"

    def predictions(self, *args: Any, **keys: Any) -> list[ClassPrediction]:
        found = super().predictions(*args, **keys)
        return [replace(one, label="ab"[one.probabilities.index(one.score) % 2]) for one in found]


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
    bundle = tiny_bundle(tmp_path / "tiny.safetensors")
    check_engine(Plain(bundle, "gate"), bundle, [picture(0), picture(1)])
    SERVED.clear()
    write_clip(tmp_path / "left.mp4", 3, fps=2.0)  # slow, so that a busy machine drops no frame
    write_folder(tmp_path / "right", 3)
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 2}}
    answers = {}
    for engine in ("plain", "torch"):
        sinks, options = [{"kind": "jsonl", "path": f"{engine}.jsonl"}], ":mark=a-" if engine == "plain" else ""
        run(write_config(tmp_path, engine=engine + options, cameras=cameras, sinks=sinks))
        lines = map(json.loads, (tmp_path / f"{engine}.jsonl").read_text().splitlines())
        answers[engine] = {(one["query"], one["frame"]): (one["label"], one["score"]) for one in lines}
    assert set(SERVED) == {"a-gate", "a-yard", "a-road"}
    assert answers["plain"].keys() == answers["torch"].keys() != set()
    for key, (label, score) in answers["plain"].items():
        assert answers["torch"][key] == (label, pytest.approx(score, abs=1e-4))


def test_registered_method_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_workload(tmp_path, frames=12)
    write_random_weights(path)
    torch.manual_seed(0)
    out = tmp_path / "box.safetensors"
    words = ["merge", str(path), "-o", str(out), "--method", "first-groups:count=2", "--accept-unproven"]
    assert main([*words, "--weights", "fp32", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "first-groups:count=2"
    assert 0 < found["saved_fraction"] < found["ceiling_fraction"] and out.is_file()


def test_registered_policy_drives_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_policy(Backwards(), rounds=50)
    path = write_workload(tmp_path, frames=0)
    assert main(["simulate", str(path), "--policy", "backwards:frames=2", "--duration", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "backwards:frames=2"
    assert all(query["processed"] > 0 for query in found["queries"])


def test_registered_decoder_explains_outputs_that_no_other_does() -> None:
    head = GraphHead((Output("rows", (9, 6)),), (32, 32))
    decoder = choose_decoder("auto", head, "detection", 2, "model.onnx")
    assert isinstance(decoder, Columns)
    check_decoder(decoder, [np.random.default_rng(0).random((2, 9, 6), np.float32)], (32, 32))


def test_registered_decoder_is_a_name_in_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"camera": "c", "task": "detection", "classes": ["a", "b"], "model": "a.onnx", "decoder": "rows", "id": "q"}
    document = {"name": "one", "cameras": {"c": {"source": "c.mp4"}}, "queries": [keys]}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(document))
    assert main(["inspect", str(tmp_path / "workload.yaml")]) == 2
    line = capsys.readouterr().err
    assert "queries[0].decoder (q): there is no such decoder: choose one of auto, " in line and ", columns (" in line


def test_registered_task_answers_on_a_box(tmp_path: Path) -> None:
    model, query = trained_looking(1), tiny_query("gate", "left", task="parity")
    write_bundle(tmp_path / "tiny.safetensors", {"gate": model}, [query], Made("tiny", "none", 0))
    write_clip(tmp_path / "left.mp4", 3, fps=2.0)
    run(write_config(tmp_path, cameras={"left": {"source": "left.mp4"}}))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines and all(line["label"] in "ab" for line in lines)
    logits = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    check_task(Parity(), logits, ["a", "b", "a", "b"], ("a", "b"), [(64, 48)] * 4)


def test_command_line_names_what_strangers_add(tmp_path: Path, repository: Path) -> None:
    site = next(path for path in sys.path if Path(path, "gemel_more-1.0.dist-info").is_dir())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), site]), "COLUMNS": "200"}
    lines = {
        "plan": "backwards  Turns in the reverse of the order listed", "run": "plain  Calls the module",
        "merge": "first-groups  Ties the groups that save most", "inspect": "columns  Rows of a box in fractions",
    }  # fmt: skip
    for command, line in lines.items():
        words = [sys.executable, "-m", "gemel", command, "--help"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert line in " ".join(done.stdout.split()).replace(line.split()[0] + " ", line.split()[0] + "  ")
