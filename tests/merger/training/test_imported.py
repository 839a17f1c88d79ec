"""Originals that start from an ONNX file: trained, written as a file, merged; alike with and without labels."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from gemel.merger import MergeOptions, Recipe, TrainOptions, merge, train_originals
from gemel.models.bundle import open_bundle
from gemel.models.errors import InputError
from gemel.models.graph import load_graph
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query
from tests.merger import detector_workload
from tests.merger.kills import kill_after, to_the_end
from tests.merger.options import ANY_EVIDENCE
from tests.models.decoders.tiny_graphs import TinyClassifier, TinyYolox, export

OPTIONS = TrainOptions(rate=1e-3, passes=320, max_epochs=20, max_cycles=1)
PREPROCESS = {"mean": [0, 0, 0], "std": [1, 1, 1]}


def write(folder: Path, *queries: dict, **keys) -> Path:
    """A workload of the rectangles whose models start from a tiny file; returns its path."""
    folder.mkdir(exist_ok=True)
    detector_workload.write(folder, [detector_workload.detector("d", "ssdlite320_mobilenet_v3_large", 96)])
    torch.manual_seed(0)
    export(folder / "tiny.onnx", TinyYolox(3), names=json.dumps(["a", "b", "bus"]))
    document = yaml.safe_load((folder / "workload.yaml").read_text())
    document["queries"] = [
        {"id": one, "camera": "c", "task": "detection", "classes": ["car", "bus"], "model": f"{one}.onnx",
         "init": "tiny.onnx", "decoder": "yolox", "preprocess": PREPROCESS, "data": "data/detection", **keys}
        for one in ("one", "two")
    ]  # fmt: skip
    (folder / "workload.yaml").write_text(yaml.safe_dump(document))
    return folder / "workload.yaml"


def test_training_writes_a_file_of_the_query_s_classes_that_answers_as_trained(tmp_path: Path):
    path = write(tmp_path)
    (result,) = train_originals(load_workload(path), ["one"], options=OPTIONS)
    assert result.id == "one" and 0 <= result.test <= 1
    graph = load_graph(tmp_path / "one.onnx")
    assert json.loads(graph.metadata["names"]) == {"0": "car", "1": "bus"} and graph.outputs[0].shape[1:] == (189, 7)
    assert not (tmp_path / "one.onnx.work").exists()
    query = load_workload(path).query("one")
    assert query.classes == ("car", "bus") and build_query(query)(torch.zeros(1, 3, 96, 96))[0].shape == (1, 189, 7)
    with pytest.raises(InputError, match="two"):
        build_query(load_workload(path).query("two"))


def test_interrupted_training_from_a_file_resumes_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    path, options = write(tmp_path), replace(OPTIONS, passes=32, min_epochs=1, max_epochs=2)
    once = {}
    for name in ("one.onnx", "again.onnx"):
        if once:
            kill_after(monkeypatch, 4, again=True)
            to_the_end(lambda again: train_originals(load_workload(path), ["one"], options=options, resume=again))
        else:
            train_originals(load_workload(path), ["one"], options=options)
        once[name] = (tmp_path / "one.onnx").read_bytes()
        (tmp_path / "one.onnx").unlink()
    assert once["one.onnx"] == once["again.onnx"] and not list(tmp_path.glob("*.work"))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [({"init": "tiny.safetensors"}, "one.onnx: cannot be read"), ({"model": "one.pt2"}, "no such `model:`")],
)
def test_training_to_or_from_another_format_is_refused(tmp_path: Path, keys: dict, problem: str):
    path = write(tmp_path, **keys)
    with pytest.raises(InputError, match=problem):
        train_originals(load_workload(path), ["one"], options=OPTIONS)
    assert not list(tmp_path.glob("*.work"))


def test_a_copy_of_an_imported_model_trains_on_its_own(tmp_path: Path):
    path = export(tmp_path / "kinds.onnx", TinyClassifier(2))
    query = {"id": "q", "camera": "c", "task": "classification", "classes": ["a", "b"], "model": str(path)}
    document = {"name": "w", "cameras": {"c": {"source": "x.mp4"}}, "queries": [query]}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    model = build_query(load_workload(tmp_path / "w.yaml").queries[0])
    other = copy.deepcopy(model)
    other(torch.rand(2, 3, 96, 96)).sum().backward()
    assert all(one.grad is None for one in model.parameters()) and all(
        one.grad is not None for one in other.parameters()
    )


@pytest.mark.parametrize(
    "data",
    [{"data": "data/detection"}, {"data": "data/detection/train/images", "labels": "none"}],
    ids=["labels", "no labels"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_imported_detectors_train_together_from_their_files(tmp_path: Path, data: dict, precision: str):
    path = write(tmp_path, **data)
    torch.manual_seed(1)
    for one in ("one", "two"):
        export(tmp_path / f"{one}.onnx", TinyYolox(2), names=json.dumps(["car", "bus"]))
    options = MergeOptions(
        Recipe(epochs=1, features=1.0, frames_per_epoch=32), precision=precision, evidence=ANY_EVIDENCE, weights="fp32"
    )
    report = merge(load_workload(path), tmp_path / "box.safetensors", "joint", options=options)
    assert report.saved_fraction == 0 and len(report.queries) == 2
    assert open_bundle(tmp_path / "box.safetensors").build("one")(torch.zeros(1, 3, 96, 96))[0].shape == (1, 189, 7)
