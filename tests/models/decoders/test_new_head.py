"""Graphs get a head for other classes, or a reason why not."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from gemel.models.decoders import coco_names
from gemel.models.decoders.graph_model import GraphDetector, build_model
from gemel.models.decoders.new_head import make_head
from gemel.models.errors import InputError
from gemel.models.graph import Graph, load_graph
from gemel.models.graph.onnx_writer import write_graph
from gemel.models.notes import collect_notes
from tests.models.decoders.exporters import export_deployed
from tests.models.decoders.tiny_graphs import SIDE, TinyClassifier, TinyYolox, export

NAMES = ("car", "bus", "truck")
FRAMES = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def yolox(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    torch.manual_seed(0)
    names = json.dumps({str(index): name for index, name in enumerate(NAMES)})
    return load_graph(export(tmp_path_factory.mktemp("graphs") / "yolox.onnx", TinyYolox(3), names=names))


def decode(graph: Graph, classes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    model = build_model(graph, "yolox", "detection", classes, "yolox.onnx")
    assert isinstance(model, GraphDetector)
    with torch.inference_mode():
        boxes, scores = model.decode(model(FRAMES))[:2]
    return boxes, scores


@pytest.mark.parametrize("classes", [("bus",), ("truck", "van"), ("a", "b", "c", "d", "e"), NAMES, NAMES[::-1]])
def test_a_new_head_answers_for_its_classes_and_keeps_boxes_and_known_classes(yolox: Graph, classes: tuple[str, ...]):
    with collect_notes() as notes:
        made = make_head(yolox, classes, "yolox", "detection", "yolox.onnx")
    assert len(notes) == (classes != NAMES)
    (old_boxes, old), (boxes, scores) = decode(yolox, NAMES), decode(made, classes)
    assert torch.allclose(boxes, old_boxes, atol=1e-6) and scores.shape == (2, 189, len(classes))
    for place, name in enumerate(classes):
        assert not torch.equal(scores[..., place], torch.zeros(2, 189))
        if name in NAMES:
            assert torch.allclose(scores[..., place], old[..., NAMES.index(name)], atol=1e-6)


def test_a_written_graph_is_read_with_the_same_answers(yolox: Graph, tmp_path: Path):
    made = make_head(yolox, ("van", "bus"), "yolox", "detection", "yolox.onnx")
    write_graph(tmp_path / "made.onnx", made)
    again = load_graph(tmp_path / "made.onnx")
    assert again.outputs == made.outputs and json.loads(again.metadata["names"]) == {"0": "van", "1": "bus"}
    for mine, theirs in zip(decode(again, ("van", "bus")), decode(made, ("van", "bus")), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_a_linear_head_of_a_classifier_is_made_new(tmp_path: Path):
    graph = load_graph(export(tmp_path / "kinds.onnx", TinyClassifier(4)))
    made = make_head(graph, ("day", "night"), "auto", "classification", "kinds.onnx")
    write_graph(tmp_path / "made.onnx", made)
    for one in (made, load_graph(tmp_path / "made.onnx")):
        model = build_model(one, "auto", "classification", ("day", "night"), "made.onnx")
        assert model(FRAMES).shape == (2, 2)


def test_a_head_whose_classes_are_in_another_order_is_refused(tmp_path: Path):
    graph = load_graph(export(tmp_path / "mixed.onnx", TinyYolox(3, order=[2, 0, 1])))
    problem = r"its head cannot be made new for 2 classes: the rows of classes\.0 are in no order of classes"
    with pytest.raises(InputError, match=problem):
        make_head(graph, ("a", "b"), "yolox", "detection", "mixed.onnx")


def test_a_head_of_one_class_beside_an_objectness_is_refused(tmp_path: Path):
    graph = load_graph(export(tmp_path / "single.onnx", TinyYolox(1)))
    with pytest.raises(InputError, match="its only class cannot be told from its objectness"):
        make_head(graph, ("a", "b"), "yolox", "detection", "single.onnx")


def test_a_written_graph_keeps_its_end_for_its_own_classes_alone(tmp_path: Path):
    graph = load_graph(export_deployed(tmp_path / "dfine.onnx"))
    for classes, ends in ((coco_names(), ["labels", "boxes", "scores"]), (("gate", "car"), None)):
        with collect_notes() as notes:
            made = make_head(graph, classes, "auto", "detection", "dfine.onnx")
        write_graph(tmp_path / "made.onnx", made)
        written = onnx.load(tmp_path / "made.onnx").graph
        assert [one.name for one in written.output] == (ends or [one.name for one in made.outputs])
        assert any("follows its TopK" in note for note in notes) == (ends is None)
        assert load_graph(tmp_path / "made.onnx").outputs == made.outputs
