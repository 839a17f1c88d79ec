"""`gemel bundle export` writes a file that runs without this project, as docs/guide.md shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from gemel.cli import main
from models import zoo
from models.bundle import BundleQuery, Made, open_bundle, write_bundle
from models.export import metadata_of
from models.predictions import DetectionPrediction
from models.tasks import task_of

SIDE = 64
MIN_SCORE = 0.73
MODELS = {"gate": ("mobilenet_v3_small", ("busy", "empty")), "bridge": ("ssd_resnet18", ("bus", "car", "truck"))}


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
        queries.append(BundleQuery(
            id=query_id, camera=query_id, task=task, classes=classes, model=name, model_args={}, input_size=SIDE,
            preprocess=zoo.zoo_preprocess(name, SIDE), fps=5.0, sla_ms=100.0, accuracy_target=0.9, threshold=MIN_SCORE,
        ))  # fmt: skip
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
        "gemel.task": "classification", "gemel.classes": ["busy", "empty"],
        "gemel.preprocess": opened.query("gate").preprocess.to_json(), "gemel.roi": None,
    }  # fmt: skip
    assert said["metadata"] == about


@pytest.mark.parametrize(("min_score", "threshold", "least"), [(0.0, None, 0.01), (0.0, 0.4, 0.4), (0.3, 0.4, 0.3)])
def test_where_detections_begin_to_count_stands_in_the_file(bundle, min_score, threshold, least):
    opened = open_bundle(bundle)
    query = replace(opened.query("bridge"), min_score=min_score, threshold=threshold)
    about = {key: json.loads(text) for key, text in metadata_of(query, opened.build("bridge"), "0" * 64).items()}
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

    opened = open_bundle(bundle)
    query, model = opened.query("bridge"), opened.build("bridge")
    batch = query.preprocess.normalise(query.preprocess.resize(frame)[None])
    answer = task_of("detection").predictions(model, model(batch), [(96, 72)], query.classes, MIN_SCORE)[0]
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
