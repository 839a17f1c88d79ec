"""`gemel inspect`: a workload's models, the zoo's matrix, and what it says of models that can share nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from gemel.cli import main
from gemel.looking.zoo_matrix import ZooMatrix, zoo_matrix
from models.weights import save_weights
from models.workload import load_workload
from models.zoo import build, names

TWO_MODELS = [
    {"id": "a", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet18", "input_size": 64},
    {"id": "b", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet34", "input_size": 64},
]


@pytest.fixture(scope="module")
def matrix() -> ZooMatrix:
    return zoo_matrix()


def test_the_matrix_holds_every_model_and_every_pair_once(matrix: ZooMatrix) -> None:
    found = json.loads(json.dumps(matrix.to_json()))
    assert sorted(model["name"] for model in found["models"]) == names()
    count = len(names())
    assert len(found["pairs"]) == len({(p["a"], p["b"]) for p in found["pairs"]}) == count * (count + 1) // 2
    sizes = {model["name"]: model["bytes"] for model in found["models"]}
    for pair in found["pairs"]:
        assert 0 <= pair["common_bytes"] <= min(sizes[pair["a"]], sizes[pair["b"]])
        assert pair["share_of_a"] == pytest.approx(pair["common_bytes"] / sizes[pair["a"]])


def test_a_backbone_is_found_inside_a_detector_and_vgg_layers_with_a_bias_meet_those_without(matrix: ZooMatrix) -> None:
    at = {model.name: index for index, model in enumerate(matrix.models)}
    assert matrix.share(at["resnet50"], at["fasterrcnn_resnet50_fpn"]) > 0.9
    assert matrix.share(at["resnet50"], at["resnet50"]) < 1  # the head is private
    assert matrix.share(at["resnet34"], at["vgg19"]) > 0.1
    strict = zoo_matrix("strict")
    assert strict.common[at["resnet34"]][at["vgg19"]] == 0


def test_the_picture_is_a_drawing_with_a_cell_for_each_pair_that_shares(matrix: ZooMatrix) -> None:
    drawing = ElementTree.fromstring(matrix.to_svg())
    titles = [element for element in drawing.iter() if element.tag.endswith("title")]
    shown = sum(matrix.share(i, j) >= 0.01 for i in range(len(matrix.models)) for j in range(len(matrix.models)))
    assert len(titles) == shown > len(matrix.models)


def test_the_command_prints_the_matrix_and_writes_the_picture(tmp_path: Path, capsys) -> None:
    assert main(["inspect", "--zoo", "--json", "--picture", str(tmp_path / "zoo.svg")]) == 0
    assert json.loads(capsys.readouterr().out)["signature"] == "wide"
    assert (tmp_path / "zoo.svg").read_text().startswith("<svg")
    assert main(["inspect", "--zoo"]) == 0
    assert "fasterrcnn_resnet50_fpn" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--zoo", "w.yaml"], ["w.yaml", "--picture", "p.svg"]])
def test_a_workload_or_the_zoo_is_inspected_not_both_nor_neither(words: list[str], capsys) -> None:
    assert main(["inspect", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_weights_decide_which_repeated_layers_meet(tmp_path: Path, capsys) -> None:
    path = _written(tmp_path, TWO_MODELS)
    deep = build("resnet34", ["x", "y"]).state_dict()
    shallow = build("resnet18", ["x", "y"]).state_dict()
    shallow["layer3.1.conv2.weight"] = deep["layer3.2.conv2.weight"].clone()
    for query, state in (("a", shallow), ("b", deep)):
        save_weights(tmp_path / f"{query}.safetensors", state)
    assert main(["inspect", str(path), "--weights", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    pairs = {tuple(path for _, path in group["members"]): group["paired"] for group in groups}
    assert pairs["layer3.1.conv2", "layer3.2.conv2"] == "likeness"


def test_a_model_that_can_share_nothing_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(3, num_classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(x.mean(dim=(2, 3)))\n"
    )
    path = _written(tmp_path, [*TWO_MODELS, {**TWO_MODELS[0], "id": "own", "model": "own:Mean"}])
    assert main(["inspect", str(path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 1 and notes[0].startswith("own: own:Mean") and "share nothing" in notes[0]


def _written(folder: Path, queries: list[dict]) -> Path:
    path = folder / "workload.yaml"
    documents = [{**query, "weights": f"{query['id']}.safetensors"} for query in queries]
    path.write_text(yaml.safe_dump({"name": "w", "cameras": {"c": {"source": "x"}}, "queries": documents}))
    assert load_workload(path).queries
    return path
