"""The checks for strangers' classes: all that are registered pass them, and they name each broken promise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from gemel.edge_runtime.engines.mapped import MappedEngine, open_weights
from gemel.edge_runtime.engines.prepare import prepare_bundle
from gemel.edge_runtime.engines.registry import ENGINES, ONNX, make_engine
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.types import Decision
from gemel.edge_runtime.sinks.base import ResultMessage, Sink, SinkConfig
from gemel.edge_runtime.sinks.jsonl import JsonLinesConfig
from gemel.edge_runtime.sinks.webhook import WebhookConfig
from gemel.merger import METHODS
from gemel.models.decoders.registry import DECODERS, Decoder, GraphHead
from gemel.models.predictions import IdentityLabel, LabelSet, MaskLabels
from gemel.models.tasks import task_of
from gemel.testing import check_decoder, check_engine, check_method, check_policy, check_sink, check_task
from tests.edge_runtime.sinks.test_webhook import Server
from tests.edge_runtime.tiny import picture, tiny_bundle
from tests.merger.tiny import write_random_weights, write_workload
from tests.parameters import every

RANDOM = np.random.default_rng(0)
SIZES, CLASSES = [(64, 48)] * 4, ("a", "b")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_engine_that_is_registered_keeps_its_promises(name, tmp_path):
    bundle = tiny_bundle(tmp_path / "tiny.safetensors", documents=name == ONNX)
    opened = open_weights(prepare_bundle(bundle)) if name == ONNX else None
    for query in ("gate", "yard"):
        engine = MappedEngine(bundle, query, opened) if opened else make_engine(name, bundle, query)
        check_engine(engine, bundle, [picture(seed) for seed in range(3)])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policy_that_is_registered_keeps_its_promises(name):
    check_policy(POLICIES[name], rounds=100)


def test_sinks_that_are_registered_keep_their_promises(tmp_path):
    check_sink(JsonLinesConfig(kind="jsonl", path=tmp_path / "results.jsonl"))
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check_sink(WebhookConfig(kind="webhook", url=server.url))
        server.shutdown()
    assert server.got


MASK = MaskLabels(np.array([[0, 1], [1, 0]], np.uint8), (0.0, 0.0, 64.0, 48.0))


@pytest.mark.parametrize(
    ("query", "outputs", "labels"),
    [
        ({"task": "classification"}, RANDOM.normal(size=(4, 2)), ["a", "b", "a", "b"]),
        ({"task": "classification", "multi_label": True}, RANDOM.normal(size=(4, 2)), [LabelSet(("a",))] * 4),
        ({"task": "segmentation"}, RANDOM.normal(size=(4, 2, 2, 2)), [MASK] * 4),
        ({"task": "embedding"}, RANDOM.normal(size=(4, 8)), [IdentityLabel(name, name) for name in "aabb"]),
    ],
)
def test_task_that_is_registered_keeps_its_promises(query, outputs, labels):
    asked = replace(QUERY, **query)
    check_task(task_of(asked), outputs.astype(np.float32), labels, CLASSES, SIZES)


@dataclass(frozen=True)
class TaskChoice:
    task: str = "classification"
    multi_label: bool = False
    agreement: str | None = None


QUERY = TaskChoice()


@pytest.mark.parametrize("method", every(sorted(METHODS), few=("none", "top-down")))
def test_method_that_is_registered_keeps_its_promises(method, tmp_path):
    path = write_workload(tmp_path, frames=12)
    write_random_weights(path)
    check_method(method, path, tmp_path / "box.safetensors")


def test_policy_that_takes_too_much_is_told():
    class Greedy(GemelPolicy):
        def decide(self, state, costs, plan):
            everything = tuple(sorted(set(costs.tensor_bytes) - set(state.resident)))
            return Decision(next(iter(costs.queries)), 0, (), everything)

    with pytest.raises(AssertionError, match=r"gemel (loads not what is missing|takes)"):
        check_policy(Greedy())


class ForgetfulConfig(SinkConfig):
    kind: Literal["forgetful"] = "forgetful"

    def build(self) -> Sink:
        return Forgetful()


class Forgetful(Sink):
    def write(self, messages: Sequence[ResultMessage]) -> None:
        for message in messages:
            message.record["seen"] = True  # type: ignore[index]


def test_sink_that_changes_results_is_told():
    with pytest.raises(AssertionError, match="forgetful changes results that all sinks share"):
        check_sink(ForgetfulConfig())


@dataclass(frozen=True)
class Columns(Decoder):
    """Boxes and scores as they are."""

    name: ClassVar[str] = "columns"
    width: int = 2

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        return [cls()] if head.outputs else []

    def decode(self, outputs: Sequence[Any], size: Any, rows: Any = slice(None)) -> Any:
        return outputs[0][:, rows, :4], outputs[0][:, rows, 4:]


def test_decoder_that_is_not_registered_is_told_and_a_registered_one_passes(monkeypatch):
    outputs = [RANDOM.random((2, 9, 6), np.float32)]
    with pytest.raises(AssertionError, match="columns is not registered: put @register above its class"):
        check_decoder(Columns(), outputs, (32, 32))
    monkeypatch.setitem(DECODERS, "columns", Columns)
    check_decoder(Columns(), outputs, (32, 32))
    with pytest.raises(AssertionError, match="columns: boxes and scores are"):
        check_decoder(Columns(width=3), outputs, (32, 32))


def test_task_that_loses_frames_is_told():
    class Short(type(task_of("classification"))):
        def predictions(self, *args: Any, **keys: Any) -> list[Any]:
            return super().predictions(*args, **keys)[:-1]

    with pytest.raises(AssertionError, match="classification: 3 predictions of 4"):
        check_task(Short(), np.zeros((4, 2), np.float32), ["a", "b", "a", "b"], CLASSES, SIZES)
