"""`gemel inspect`: a workload's models, and what it says of models that can share nothing."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from gemel.cli import main
from models.weights import save_weights
from models.workload import load_workload
from models.zoo import build

TWO_MODELS = [
    {"id": "a", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet18", "input_size": 64},
    {"id": "b", "camera": "c", "task": "classification", "classes": ["x", "y"], "model": "resnet34", "input_size": 64},
]


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
