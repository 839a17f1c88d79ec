"""`gemel bundle export` writes a file that runs without this project, as docs/guide.md shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from gemel.cli import main
from gemel.models import zoo
from gemel.models.bundle import BundleQuery, Made, open_bundle, write_bundle
from gemel.models.detector import Detector, read_outputs
from gemel.models.errors import InputError
from gemel.models.export.export_folder import export_folder
from gemel.models.export.network_outputs import CANDIDATES, NetworkOutputs
from gemel.models.export.query_export import metadata_of
from gemel.models.predictions import DetectionPrediction
from gemel.models.tasks import task_of

SIDE = 64
MIN_SCORE = 0.73
MODELS = {"gate": ("mobilenet_v3_small", ("busy", "empty")), "bridge": ("ssd_resnet18", ("bus", "car", "truck"))}


def record_of(query: str, model: str, classes: tuple[str, ...], side: int, task: Any = "classification") -> BundleQuery:
    return BundleQuery(
        id=query, camera=query, task=task, classes=classes, model=model, model_args={}, input_size=side,
        preprocess=zoo.zoo_preprocess(model, side), fps=5.0, sla_ms=100.0, accuracy_target=0.9, threshold=MIN_SCORE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A classifier and a detector whose scores are spread."""
    torch.manual_seed(0)
    models, queries = {}, []
    for query_id, (name, classes) in MODELS.items():
        task = "detection" if query_id == "bridge" else "classification"
        model = zoo.build(name, classes, {}, SIDE, task)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = None
        model.train()(torch.randn(8, 3, SIDE, SIDE))
        models[query_id] = model.eval()
        queries.append(record_of(query_id, name, classes, SIDE, task))
    head: Any = models["bridge"].get_submodule("head.classification_head")
    for part in head.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=0.05)
    path = tmp_path_factory.mktemp("bundle") / "box.safetensors"
    write_bundle(path, models, queries, Made("box", "wide", 0))
    return path


def test_an_exported_query_answers_as_the_bundle_does(bundle, tmp_path, capsys):
    out = tmp_path / "gate.onnx"
    assert main(["bundle", "export", str(bundle), "--query", "gate", "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["query"] == "gate" and said["file"] == str(out) and said["bytes"] == out.stat().st_size
    assert said["inputs"] == {"frames": ["batch", 3, SIDE, SIDE]} and said["outputs"] == {"logits": ["batch", 2]}

    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    frames = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    found = session.run(["logits"], {"frames": frames.numpy()})[0]
    opened = open_bundle(bundle)
    wanted = opened.build("gate")(frames)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
    about = {key: json.loads(text) for key, text in session.get_modelmeta().custom_metadata_map.items()}
    assert about == {
        "gemel.query": "gate", "gemel.bundle": opened.digest[:12], "gemel.model": "mobilenet_v3_small",
        "gemel.task": "classification", "gemel.classes": ["busy", "empty"], "gemel.columns": [0, 1],
        "gemel.preprocess": opened.query("gate").preprocess.to_json(), "gemel.roi": None, "gemel.frame_size": None,
    }  # fmt: skip
    assert said["metadata"] == about


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "onnx"
    assert main(["bundle", "export", str(bundle), "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("query", sorted(MODELS))
def test_every_query_of_an_exported_folder_answers_as_the_bundle(bundle, folder, query):
    session = onnxruntime.InferenceSession(str(folder / f"{query}.onnx"), providers=["CPUExecutionProvider"])
    frames = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    found = session.run(None, {"frames": frames.numpy()})
    model = open_bundle(bundle).build(query)
    wanted = model.export_outputs(frames) if isinstance(model, Detector) else (model(frames),)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, atol=1e-4, rtol=1e-4)


def test_an_exported_folder_stores_equal_tensors_at_one_offset(tmp_path):
    model = zoo.build("cifar_resnet20", ("car", "bus"), {}, 32)
    records = [record_of(query, "cifar_resnet20", ("car", "bus"), 32) for query in ("east", "west")]
    write_bundle(tmp_path / "box", {"east": model, "west": model}, records, Made("box", "none", 0))
    written = export_folder(open_bundle(tmp_path / "box"), tmp_path / "onnx")
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["east.onnx", "weights.bin", "west.onnx"]
    kept = sum(tensor.nbytes for tensor in model.state_dict().values() if tensor.nbytes >= 1024)
    assert kept <= written.weights_bytes <= 1.05 * kept
    assert written.weights_bytes == (tmp_path / "onnx" / "weights.bin").stat().st_size
    places = [external_places(tmp_path / "onnx" / f"{query}.onnx") for query in ("east", "west")]
    assert places[0] == places[1] and len(places[0]) > 15


def external_places(path: Path) -> dict[str, dict[str, str]]:
    """Where the tensors of a file lie, by name."""
    graph = onnx.load(path, load_external_data=False).graph
    external = [one for one in graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    return {one.name: {entry.key: entry.value for entry in one.external_data} for one in external}


def test_a_model_repository_has_one_file_of_weights(bundle, tmp_path, capsys):
    out = tmp_path / "models"
    assert main(["bundle", "export", str(bundle), "-o", str(out), "--layout", "triton", "--json"]) == 0
    said = {row["query"]: row["file"] for row in json.loads(capsys.readouterr().out)["queries"]}
    assert sorted(path.name for path in out.iterdir()) == ["bridge", "gate"]
    assert len({(out / query / "1" / "weights.bin").stat().st_ino for query in MODELS}) == 1
    for query in MODELS:
        assert said[query] == str(out / query / "1" / "model.onnx")
        options = onnxruntime.SessionOptions()
        session = onnxruntime.InferenceSession(said[query], options, providers=["CPUExecutionProvider"])
        text = (out / query / "config.pbtxt").read_text()
        assert f'name: "{query}"' in text and "max_batch_size: 8" in text
        assert f'input {{ name: "frames" data_type: TYPE_FP32 dims: [3, {SIDE}, {SIDE}] }}' in text
        assert all(f'output {{ name: "{value.name}"' in text for value in session.get_outputs())
    assert main(["bundle", "export", str(bundle), "--query", "gate", "-o", str(out), "--layout", "triton"]) == 2
    assert "leave --query out" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(bundle, folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    assert main(["bundle", "export", str(bundle), "-o", str(folder)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_export_that_fails_leaves_nothing(bundle, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise InputError("bridge", "cannot be exported", "try another")

    monkeypatch.setattr("gemel.models.export.export_folder.query_graph", fail)
    with pytest.raises(InputError):
        export_folder(open_bundle(bundle), tmp_path / "onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("min_score", "threshold", "least"), [(0.0, None, 0.25), (0.0, 0.4, 0.4), (0.3, 0.4, 0.3)])
def test_where_detections_begin_to_count_stands_in_the_file(bundle, min_score, threshold, least):
    opened = open_bundle(bundle)
    query = replace(opened.query("bridge"), min_score=min_score, threshold=threshold)
    outputs = NetworkOutputs(False, CANDIDATES, 0.5)
    about = {key: json.loads(text) for key, text in metadata_of(query, outputs, "0" * 64).items()}
    assert about["gemel.least_score"] == least and about["gemel.threshold"] == threshold
    assert about["gemel.min_score"] == (min_score or None)


def test_export_code_of_the_docs_equals_the_box(bundle, tmp_path, repository):
    names: dict[str, Any] = {"path": str(tmp_path / "bridge.onnx"), "picture": str(tmp_path / "frame.png")}
    rng = np.random.default_rng(0)
    frame = cv2.resize(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8), (96, 72))
    cv2.imwrite(names["picture"], frame[..., ::-1])
    assert main(["bundle", "export", str(bundle), "--query", "bridge", "-o", names["path"], "--batch", "1"]) == 0

    code = re.findall(r"```python\n(.*?)```", (repository / "docs" / "guide.md").read_text(), re.DOTALL)
    exec(code[0], names)
    assert "session" in names
    exec(code[1], names)

    opened = open_bundle(bundle)
    query, model = opened.query("bridge"), opened.build("bridge")
    batch = torch.from_numpy(query.preprocess(frame))
    answer = read_outputs(task_of("detection"), model, model(batch), [(96, 72)], query.classes, MIN_SCORE)[0]
    assert isinstance(answer, DetectionPrediction)
    wanted = sorted(zip(answer.classes, answer.scores, answer.boxes, strict=True))
    assert 5 < len(wanted) < 50 and len({label for label, _, _ in wanted}) > 1
    found = sorted(names["detections"])
    assert [label for label, _, _ in found] == [label for label, _, _ in wanted]
    np.testing.assert_allclose([score for _, score, _ in found], [score for _, score, _ in wanted], atol=0.02)
    np.testing.assert_allclose([box for _, _, box in found], [box for _, _, box in wanted], atol=1.0)


@pytest.mark.parametrize(
    "words, fault",
    [
        (["--query", "nobody", "-o", "new.onnx"], "has no query 'nobody'; it has: gate, bridge"),
        (["--query", "gate", "-o", "there.onnx"], "there.onnx: exists already; move it away, or choose another path"),
        (["--query", "gate", "-o", "no/new.onnx"], "there is no directory no; create it, or choose another path"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, fault, bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there.onnx").touch()
    assert main(["bundle", "export", str(bundle), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1 and fault in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["there.onnx"] and not Path("there.onnx").stat().st_size


@pytest.mark.parametrize("batch", ["0", "-1", "all"])
def test_export_bad_batch_is_a_usage_error(batch, bundle, capsys):
    words = ["bundle", "export", str(bundle), "--query", "gate", "-o", "new.onnx", "--batch", batch]
    assert main(words) == 2 and "--batch" in capsys.readouterr().err
