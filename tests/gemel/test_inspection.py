"""`gemel inspect`: a workload's models, and what it says of models that can share nothing."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

from gemel.cli import main
from gemel.models.files.weights import save_weights
from gemel.models.workload import load_workload
from gemel.models.zoo import build, build_query
from tests.models.colours import write_colours

TWO_MODELS = [
    {"id": "a", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet18", "input_size": 64},
    {"id": "b", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet34", "input_size": 64},
]


def test_inspect_with_weights_pairs_similar_layers(tmp_path: Path, capsys) -> None:
    path = _write_workload(tmp_path, TWO_MODELS)
    deep = build("resnet34", ["x", "y"]).state_dict()
    shallow = build("resnet18", ["x", "y"]).state_dict()
    shallow["layer3.1.conv2.weight"] = deep["layer3.2.conv2.weight"].clone()
    for query, state in (("a", shallow), ("b", deep)):
        save_weights(tmp_path / f"{query}.safetensors", state)
    assert main(["inspect", str(path), "--weights", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    pairs = {tuple(path for _, path in group["members"]): group["paired"] for group in groups}
    assert pairs["layer3.1.conv2", "layer3.2.conv2"] == "likeness"


def test_inspect_counts_one_network_for_all_and_fewer_bits(tmp_path: Path, capsys) -> None:
    path = _write_workload(tmp_path, TWO_MODELS)
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = [query["bytes"] for query in found["queries"]]
    assert found["network_fraction"] == pytest.approx(1 - min(sizes) / sum(sizes))
    assert found["network_fraction"] > found["ceiling_fraction"]
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "layers alone: 34 %; with one network for all of a task: up to 66 %; with weights in int8 up to" in text
    own = _write_workload(tmp_path, [TWO_MODELS[0], {**TWO_MODELS[1], "keep_architecture": True}])
    assert main(["inspect", str(own)]) == 0
    assert "one network" not in capsys.readouterr().out


def test_inspect_names_a_model_that_can_share_nothing(tmp_path: Path, capsys) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(3, num_classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(x.mean(dim=(2, 3)))\n"
    )
    path = _write_workload(tmp_path, [*TWO_MODELS, {**TWO_MODELS[0], "id": "own", "model": "own:Mean"}])
    assert main(["inspect", str(path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 1 and notes[0].startswith("own: own:Mean") and "share nothing" in notes[0]


def _write_workload(folder: Path, queries: list[dict]) -> Path:
    path = folder / "workload.yaml"
    documents = [{**query, "weights": f"{query['id']}.safetensors"} for query in queries]
    path.write_text(yaml.safe_dump({"name": "w", "cameras": {"c": {"source": "x"}}, "queries": documents}))
    assert load_workload(path).queries
    return path


WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32,
     weights: a.safetensors, data: data}
"""


@pytest.fixture
def complete(tmp_path):
    """A workload of which everything is there."""
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    (tmp_path / "gate.mp4").write_bytes(b"a clip")
    for index, (split, label) in enumerate(product(("train", "val", "test"), "xy")):
        (tmp_path / "data" / split / label).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / "data" / split / label / "c__000000.png"), np.full((8, 8, 3), index, np.uint8))
    torch.manual_seed(0)
    save_weights(tmp_path / "a.safetensors", build_query(load_workload(path).query("a")).state_dict())
    return path


def test_inspect_without_weights_has_the_promised_keys(tmp_path: Path, capsys) -> None:
    path = _write_workload(tmp_path, [TWO_MODELS[0], {**TWO_MODELS[0], "id": "c", "classes": ["x", "y", "z"]}])
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"id", "model", "layers", "bytes"} <= found["queries"][0].keys()
    assert {"signature", "bytes", "members", "saved_bytes"} <= found["groups"][0].keys()
    assert found["total_bytes"] == sum(query["bytes"] for query in found["queries"])
    assert 0.4 < found["ceiling_fraction"] < 0.5, "two equal backbones; heads and norms stay private"
    assert found["ceiling_bytes"] == sum(group["saved_bytes"] for group in found["groups"])
    assert main(["inspect", str(path)]) == 0
    assert "in groups" in capsys.readouterr().out


def inspect_warnings(capsys, path) -> list[str]:
    assert main(["inspect", str(path), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)["warnings"]
    lines = [line for line in printed.err.splitlines() if not line.startswith("note: ")]
    assert lines == [f"warning: {line}" for line in found]
    return found


def test_inspect_of_a_complete_workload_warns_of_nothing(complete, capsys):
    assert inspect_warnings(capsys, complete) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("gate.mp4", "gat.mp4"), "cameras.gate.source: "),
        (("a.safetensors", "b.safetensors"), "b.safetensors does not exist; correct the path, or let `gemel train`"),
        (("a.safetensors", "b.pth"), "b.pth does not exist; correct the path; `gemel train` writes .safetensors or"),
        (("weights: a.safetensors, ", ""), "weights (a): none are named; name a file"),
        (("data: data", "data: dat"), "dat does not exist; correct the path, or put frames there"),
        ((", data: data", ""), "data (a): no frames are named; name a folder or a video"),
        (("[x, y]", "[x, z]"), "no frames of class 'z' (query a); add frames of it"),
    ],
)
def test_inspect_of_a_missing_input_names_file_key_and_hint(complete, capsys, change, expected):
    complete.write_text(WORKLOAD.replace(*change))
    lines = inspect_warnings(capsys, complete)
    assert lines and all(str(complete.parent) in line and "\n" not in line for line in lines)
    assert expected in lines[0]


def test_inspect_of_a_wrong_class_count_says_so(complete, capsys):
    state = build("cifar_resnet20", ("x", "y", "z"), {}, 32).state_dict()
    save_weights(complete.parent / "a.safetensors", state)
    (line,) = inspect_warnings(capsys, complete)
    assert "a.safetensors: weights (a): only the head does not fit the class list (2 in the query)" in line
    assert "; list in `classes` the classes these weights were trained for" in line


def test_inspect_with_weights_warns_of_labels_that_prove_nothing(complete, capsys):
    assert main(["inspect", str(complete), "--weights", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["warnings"]
    assert line.startswith("a: no evidence: val holds ") and " frames of each of two answers are needed; add" in line


@pytest.mark.parametrize("options", [[], ["--weights"]])
def test_inspect_with_weights_says_what_each_original_reaches(options, tmp_path, capsys):
    path = write_colours(tmp_path, preprocess={"mean": [0, 0, 0], "std": [1, 1, 1]})
    assert main(["inspect", str(path), *options]) == 0
    text = capsys.readouterr().out
    assert text.count("1.00 balanced accuracy, 96 frames") == text.count("original on val") * 2 == 2 * len(options)


def test_inspect_with_weights_names_a_preprocess_that_answers_better(tmp_path, capsys):
    path = write_colours(tmp_path, preprocess={"mean": [0, 0, 0], "std": [1, 1, 1], "channels": "bgr"})
    assert main(["inspect", str(path), "--weights", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [line for line in found["warnings"] if "preprocess" in line]
    assert [(query["val"], query["val_frames"]) for query in found["queries"]] == [(0.0, 96), (0.0, 96)]
    assert [line[:2] for line in lines] == ["a:", "b:"] and all("`preprocess: {channels: rgb}`" in one for one in lines)
