"""The checks for strangers' classes: all that are registered pass them, and they name each broken promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from gemel.edge_runtime.engines.base import ENGINES, ONNX
from gemel.edge_runtime.engines.mapped import MappedEngine, open_weights
from gemel.edge_runtime.engines.prepare import prepare_bundle
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.types import Decision
from gemel.edge_runtime.sinks.base import SINKS, ResultMessage, Sink, SinkConfig
from gemel.merger import METHODS
from gemel.models.decoders import choose_decoder
from gemel.models.decoders.decoder import DECODERS, Decoder, GraphHead, Output
from gemel.models.objects.candidates import DecodedReader, SuppressedReader
from gemel.models.predictions import BoxLabels, IdentityLabel, LabelSet, MaskLabels, PoseLabels
from gemel.models.tasks import TASKS, task_of
from gemel.testing import check_decoder, check_engine, check_method, check_policy, check_sink, check_task
from tests.edge_runtime.sinks.broker import MOSQUITTO, Broker
from tests.edge_runtime.sinks.test_webhook import Server
from tests.edge_runtime.tiny import picture, tiny_bundle
from tests.merger.tiny import write_random_weights, write_workload
from tests.parameters import every

RANDOM = np.random.default_rng(0)
SIZES, CLASSES = [(64, 48)] * 4, ("a", "b")


@pytest.mark.parametrize("name", ENGINES)
def test_engine_that_is_registered_keeps_its_promises(name, tmp_path):
    bundle = tiny_bundle(tmp_path / "tiny.safetensors", documents=name == ONNX)
    opened = open_weights(prepare_bundle(bundle)) if name == ONNX else None
    for query in ("gate", "yard"):
        engine = MappedEngine(bundle, query, opened) if opened else ENGINES[name](bundle, query)
        check_engine(engine, bundle, [picture(seed) for seed in range(3)])


@pytest.mark.parametrize("name", POLICIES)
def test_policy_that_is_registered_keeps_its_promises(name):
    check_policy(POLICIES[name], rounds=100)


def jsonl(folder: Path) -> Iterator[dict[str, Any]]:
    yield {"path": folder / "results.jsonl"}


def webhook(_: Path) -> Iterator[dict[str, Any]]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"url": server.url}
        server.shutdown()
    assert server.got


def mqtt(folder: Path) -> Iterator[dict[str, Any]]:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    broker = Broker(folder)
    yield {"host": "127.0.0.1", "port": broker.port}
    broker.end()


DESTINATIONS = {one.__name__: contextmanager(one) for one in (jsonl, webhook, mqtt)}


@pytest.mark.parametrize("kind", SINKS)
def test_sink_that_is_registered_keeps_its_promises(kind, tmp_path):
    with DESTINATIONS[kind](tmp_path) as keys:
        check_sink(SINKS[kind](kind=kind, **keys))


OUTPUTS: dict[str, tuple[list[tuple[int, ...]], list[set[str]], dict[str, str]]] = {
    "detr": ([(9, 3), (9, 4)], [set(), {"Sigmoid"}], {"names": "['a', 'b', 'c']"}),
    "yolo": ([(7, 525)], [set()], {}),
    "yolo-end2end": ([(9, 6)], [set()], {"names": "['a', 'b', 'c']"}),
    "fastestdet": ([(8, 10, 10)], [set()], {}),
    "nanodet": ([(525, 35)], [{"Sigmoid"}], {}),
    "ssd": ([(1917, 4), (1917, 4)], [{"Softmax"}, {"Exp", "Mul"}], {}),
    "yolo-seg": ([(39, 525), (32, 40, 40)], [set(), set()], {}),
    "yolo-obb": ([(8, 525)], [{"Cos", "Sin"}], {}),
    "yolo-pose": ([(14, 525)], [set()], {"kpt_shape": "[3, 3]"}),
    "yolov5": ([(1575, 8)], [set()], {}),
    "yolox": ([(525, 8)], [set()], {}),
}
"""Of each decoder the shapes of outputs for 160 x 160 that it explains, their last operators, and the metadata."""


@pytest.mark.parametrize("name", [name for name, one in DECODERS.items() if one.task != "classification"])
def test_decoder_that_is_registered_keeps_its_promises(name):
    shapes, tails, metadata = OUTPUTS[name]
    outputs = tuple(Output(f"out{place}", *each) for place, each in enumerate(zip(shapes, map(frozenset, tails))))
    decoder = choose_decoder(name, GraphHead(outputs, (160, 160), metadata), None, None, "model.onnx")
    check_decoder(decoder, [RANDOM.random((2, *shape), np.float32) for shape in shapes], (160, 160))


MASK = MaskLabels(np.array([[0, 1], [1, 0]], np.uint8), (0.0, 0.0, 64.0, 48.0))
BOXES = np.array([[[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]]] * 4, np.float32)
SCORES = np.array([[[0.9, 0], [0, 0.8]]] * 4, np.float32)
PLACED: tuple[Any, ...] = ((0.0, 0.0, 32.0, 24.0), (32.0, 24.0, 64.0, 48.0))
POSES = [BOXES, SCORES.max(2), SCORES.argmax(2), np.full((4, 2, 3, 3), 0.25, np.float32)]
SHOWN = (((16.0, 12.0, 1.0),) * 3,) * 2
EXAMPLES: dict[str, list[tuple[dict[str, Any], Any, list[Any], Any]]] = {
    "classification": [
        ({}, RANDOM.normal(size=(4, 2)), ["a", "b", "a", "b"], None),
        ({"multi_label": True}, RANDOM.normal(size=(4, 2)), [LabelSet(("a",))] * 4, None),
    ],
    "segmentation": [({}, RANDOM.normal(size=(4, 2, 2, 2)), [MASK] * 4, None)],
    "embedding": [({}, RANDOM.normal(size=(4, 8)), [IdentityLabel(name, name) for name in "aabb"], None)],
    "tensor": [
        (
            {"agreement": by},
            RANDOM.normal(size=(4, 8)),
            task_of("tensor").predictions(None, RANDOM.random((4, 8)), [], ()),
            None,
        )
        for by in ("cosine", "relative-error")
    ],
    "detection": [({}, (BOXES, SCORES), [BoxLabels(CLASSES, PLACED)] * 4, DecodedReader(0.5))],
    "keypoints": [({}, POSES, [PoseLabels(CLASSES, PLACED, points=SHOWN)] * 4, SuppressedReader())],
}
"""Of each task what a query says beside it, a network's outputs, labels of four frames, and what reads the outputs."""


@pytest.mark.parametrize("name", TASKS)
def test_task_that_is_registered_keeps_its_promises(name):
    for keys, outputs, labels, reader in EXAMPLES[name]:
        values = outputs if reader else outputs.astype(np.float32)
        check_task(task_of(TaskChoice(name, **keys)), values, labels, CLASSES, SIZES, reader)


@dataclass(frozen=True)
class TaskChoice:
    task: str
    multi_label: bool = False
    agreement: str | None = None


@pytest.mark.parametrize("method", every(METHODS.names, few=("none", "top-down")))
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
    with pytest.raises(AssertionError, match="columns is no entry point of gemel"):
        check_decoder(Columns(), outputs, (32, 32))
    monkeypatch.setitem(DECODERS.added, "columns", Columns)
    check_decoder(Columns(), outputs, (32, 32))
    with pytest.raises(AssertionError, match="columns: boxes and scores are"):
        check_decoder(Columns(width=3), outputs, (32, 32))


def test_task_that_loses_frames_is_told():
    class Short(type(task_of("classification"))):
        def predictions(self, *args: Any, **keys: Any) -> list[Any]:
            return super().predictions(*args, **keys)[:-1]

    with pytest.raises(AssertionError, match="classification: 3 predictions of 4"):
        check_task(Short(), np.zeros((4, 2), np.float32), ["a", "b", "a", "b"], CLASSES, SIZES)
