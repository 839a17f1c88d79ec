"""Faults in YAML files: one line that names the file, the key or the line, and what to do."""

from __future__ import annotations

import pytest
import yaml

from edge_runtime.config import load_config
from models.errors import InputError
from models.workload import load_workload

WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32}
"""


def refused(load, path, text) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and "\n" not in said
    return said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("name: one", "name: one\nacuracy_target: 0.9"), "acuracy_target: unknown key; did you mean accuracy_target?"),
        (
            ("input_size: 32", "input_size: 32, clases: [x]"),
            "queries[0].clases (a): unknown key; did you mean classes?",
        ),
        (("fps: 5", "frames: 5"), "cameras.gate.frames: unknown key; remove it; the keys here are source, fps"),
        (("fps: 5", "FPS: 5"), "cameras.gate.FPS: unknown key; did you mean fps?"),
    ],
)
def test_a_misspelt_key_is_told_the_nearest_one(tmp_path, change, expected):
    said = refused(load_workload, tmp_path / "w.yaml", WORKLOAD.replace(*change))
    assert said == f"{tmp_path / 'w.yaml'}: {expected}"


def test_a_misspelt_key_of_a_box_config_is_told_the_nearest_one(tmp_path):
    box = {"bundle": "b.safetensors", "budget": "1MiB", "cameras": {"gate": {"source": "gate.mp4"}}, "polcy": "ours"}
    said = refused(load_config, tmp_path / "box.yaml", yaml.safe_dump(box))
    assert said.endswith("polcy: unknown key; did you mean policy?")
    box["cameras"]["gate"]["soruce"] = box.pop("polcy")
    said = refused(load_config, tmp_path / "box.yaml", yaml.safe_dump(box))
    assert said.endswith("cameras.gate.soruce: unknown key; did you mean source?")


@pytest.mark.parametrize("text", ["name: [one", "a: b: c", "a: 1\n\tb: 2", 'name: "one'])
def test_what_is_no_yaml_is_told_by_line_and_column(tmp_path, text):
    said = refused(load_workload, tmp_path / "w.yaml", text)
    assert "is not YAML: line " in said and ", column " in said and "<unicode" not in said
