"""What a network's outputs mean by its document alone: predictions as those of the architecture, which is not built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from gemel.models.bundle import BundleQuery
from gemel.models.decoders.graph_model import GraphModel, build_model
from gemel.models.detector import Detector, read_outputs
from gemel.models.errors import InputError
from gemel.models.export.export_document import export_document
from gemel.models.export.network_outputs import OUTPUTS_KEY, NetworkOutputs, OutputReader, describe_outputs
from gemel.models.graph import load_graph
from gemel.models.graph.stored import store_graph
from gemel.models.tasks import task_of
from tests.edge_runtime.engines.sample_bundles import build_model as build_zoo_model
from tests.edge_runtime.engines.sample_bundles import make_query
from tests.edge_runtime.tiny import query, trained_looking
from tests.models.decoders.tiny_graphs import SIDE, TinyClassifier, TinyYolox, export

SIZES = [(200, 100), (64, 64)]
COCO_CLASSES = ("person", "bicycle", "car")


def draw_frames(count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def run_as_box(answers: Any) -> list[np.ndarray]:
    """Outputs as ONNX Runtime returns them."""
    outputs = (answers,) if isinstance(answers, Tensor) else answers
    return [output.numpy() for output in outputs]


def assert_read_alike(record: BundleQuery, model: nn.Module, reader: OutputReader, runs: list[Any]) -> None:
    """That predictions from raw outputs are those of the architecture, in each field."""
    frames = draw_frames(2, record.preprocess.size[0])
    with torch.inference_mode():
        outputs = model(frames)
    expected = read_outputs(task_of(record), model, outputs, SIZES, record.classes, 0.05, record.preprocess)
    predictions = reader.predictions(reader.join(runs), SIZES, 0.05)
    assert len(predictions) == len(expected) == 2
    for prediction, other in zip(predictions, expected, strict=True):
        assert type(prediction) is type(other)
        for key, value in vars(other).items():
            np.testing.assert_equal(getattr(prediction, key), value)


@pytest.mark.parametrize("name", ["classifier", "ssdlite320_mobilenet_v3_large"])
def test_outputs_of_an_exported_network_are_read_as_by_its_architecture(name):
    if name == "classifier":
        model, record = trained_looking(1).eval(), query("one", "left")
    else:
        model, record = build_zoo_model(name, 96), make_query("one", name, 96)
    described = describe_outputs(record, export_document(model, record.input_size))
    assert not described.is_single and described.head is None
    frames = draw_frames(2, record.preprocess.size[0])
    with torch.inference_mode():
        outputs = model.export_outputs(frames) if isinstance(model, Detector) else model(frames)
    assert_read_alike(record, model, OutputReader(record, described), [run_as_box(outputs)])


def graph_of(tmp_path, module: nn.Module, record: BundleQuery, **metadata: str) -> tuple[GraphModel, NetworkOutputs]:
    torch.manual_seed(0)
    graph = load_graph(export(tmp_path / "model.onnx", module, **metadata))
    model = build_model(graph, "auto", record.task, record.classes, "model.onnx").eval()
    return model, describe_outputs(replace(record, graph="a" * 64), store_graph(graph))


def graph_query(task: str, classes: tuple[str, ...]) -> BundleQuery:
    record = make_query("one", "graph", SIDE, task=task, classes=classes)
    return replace(record, graph="a" * 64)


@pytest.mark.parametrize("task", ["detection", "classification"])
def test_outputs_of_an_imported_network_are_read_as_by_its_architecture(tmp_path, task):
    record = graph_query(task, COCO_CLASSES)
    module = TinyYolox(3) if task == "detection" else TinyClassifier(3)
    model, described = graph_of(tmp_path, module, record, names=str(dict(enumerate(COCO_CLASSES))))
    assert described.head is not None and not described.is_single
    stored = TypeAdapter(NetworkOutputs).validate_json(TypeAdapter(NetworkOutputs).dump_json(described))
    assert stored == described, "an index holds it as JSON"
    with torch.inference_mode():
        frames = draw_frames(2, SIDE)
        whole = [run_as_box(model._run(frames))]
        apart = [run_as_box(model._run(frame)) for frame in frames.split(1)]
    assert_read_alike(record, model, OutputReader(record, stored), whole)
    joined, expected = (OutputReader(record, stored).join(runs) for runs in (apart, whole))
    np.testing.assert_allclose(joined[0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_document_that_does_not_say_what_its_outputs_are_is_refused():
    record = query("one", "left")
    model = onnx.load_from_string(export_document(trained_looking(1).eval(), record.input_size))
    (entry,) = [one for one in model.metadata_props if one.key == OUTPUTS_KEY]
    for text in ('{"kind": "poems"}', '{"kind": "candidates", "nms_iou": 7}', "[]"):
        entry.value = text
        with pytest.raises(InputError, match="does not say what its outputs are"):
            describe_outputs(record, model.SerializeToString())


def test_classes_that_do_not_fit_an_imported_network_are_refused(tmp_path):
    record = graph_query("classification", COCO_CLASSES)
    _, described = graph_of(tmp_path, TinyClassifier(3), record)
    with pytest.raises(InputError):
        OutputReader(replace(record, classes=("a", "b")), described)
