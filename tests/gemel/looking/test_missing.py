"""`gemel inspect` warns of what is not there or does not fit, and goes on."""

import json

import cv2
import numpy as np
import pytest
import torch

from gemel.cli import main
from models.weights import save_weights
from models.workload import load_workload
from models.zoo import build, build_query

WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32,
     weights: a.safetensors, data: data}
"""


@pytest.fixture
def whole(tmp_path):
    """A workload of which everything is there."""
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    (tmp_path / "gate.mp4").write_bytes(b"a clip")
    for split in ("train", "val", "test"):
        for label in "xy":
            (tmp_path / "data" / split / label).mkdir(parents=True)
            cv2.imwrite(str(tmp_path / "data" / split / label / "c__000000.png"), np.zeros((8, 8, 3), np.uint8))
    torch.manual_seed(0)
    save_weights(tmp_path / "a.safetensors", build_query(load_workload(path).query("a")).state_dict())
    return path


def warned(capsys, path) -> list[str]:
    assert main(["inspect", str(path), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["warnings"]
    assert said.err.splitlines() == [f"warning: {line}" for line in found]
    return found


def test_where_everything_is_there_nothing_is_warned_of(whole, capsys):
    assert warned(capsys, whole) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("gate.mp4", "gat.mp4"), "cameras.gate.source: "),
        (("a.safetensors", "b.safetensors"), "b.safetensors does not exist; correct the path, or let `gemel train`"),
        (("weights: a.safetensors, ", ""), "weights (a): none are named; name a file"),
        (("data: data", "data: dat"), "dat does not exist; correct the path, or put frames there"),
        ((", data: data", ""), "data (a): no frames are named; name a folder or a video"),
        (("[x, y]", "[x, z]"), "no frames of class 'z' (query a); add frames of it"),
    ],
)
def test_what_is_not_there_is_one_line_with_file_key_and_remedy(whole, capsys, change, expected):
    whole.write_text(WORKLOAD.replace(*change))
    lines = warned(capsys, whole)
    assert lines and all(str(whole.parent) in line and "\n" not in line for line in lines)
    assert expected in lines[0]


def test_a_class_count_that_does_not_fit_the_weights_is_told(whole, capsys):
    state = build("cifar_resnet20", ("x", "y", "z"), {}, 32).state_dict()
    save_weights(whole.parent / "a.safetensors", state)
    (line,) = warned(capsys, whole)
    assert "a.safetensors: weights (a): only the head does not fit the class list (2 in the query)" in line
    assert "; list in `classes` the classes these weights were trained for" in line


def test_weights_of_another_architecture_and_a_damaged_file_are_told(whole, capsys):
    save_weights(whole.parent / "a.safetensors", build("mobilenet_v3_small", ("x", "y")).state_dict())
    (line,) = warned(capsys, whole)
    assert "give weights of this architecture" in line
    (whole.parent / "a.safetensors").write_bytes(b"no weights")
    (line,) = warned(capsys, whole)
    assert "is truncated or no safetensors file" in line
