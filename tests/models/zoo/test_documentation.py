"""docs/zoo.md: its model of one's own works, its lines are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from models import zoo
from models.errors import InputError
from models.sharing.layers import layers_of
from models.weights import load_weights, save_weights
from models.workload import load_workload


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    """The documentation of the zoo."""
    return (repository / "docs" / "zoo.md").read_text(encoding="utf-8")


@pytest.fixture
def example(page: str, tmp_path: Path) -> Path:
    """The workload of the documentation with its nets.py beside it, and weights for it."""
    for name, content in re.findall(r"```\w+ file=(\S+)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).write_text(content)
    path = tmp_path / "workload.yaml"
    model = zoo.build_query(load_workload(path).query("open"))
    save_weights(tmp_path / "open.safetensors", model.state_dict())
    return path


def test_the_model_of_ones_own_is_read_built_and_loaded(example: Path) -> None:
    query = load_workload(example).query("open")
    model = load_weights(query, zoo.build_query(query))
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 2)
    assert [layer.path for layer in layers_of(query) if not layer.head] == ["body.0"]


def test_the_python_lines_run(page: str) -> None:
    block = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    names: dict = {}
    exec(block[1], names)
    assert "yolov3" in names["names"] and names["model"](torch.zeros(1, 3, 96, 96)).shape == (1, 2)


def change(path: Path, **keys: object) -> None:
    """Change the example's query."""
    document = yaml.safe_load(path.read_text())
    document["queries"][0] |= keys
    path.write_text(yaml.safe_dump(document))


@pytest.mark.parametrize(
    "keys",
    [
        {"model": "resnet-51"},
        {"model": "nets:door"},
    ],
)
def test_the_lines_about_what_does_not_fit_are_the_real_ones(page: str, example: Path, keys: dict) -> None:
    change(example, **keys)
    with pytest.raises(InputError) as caught:
        query = load_workload(example).query("open")
        model = zoo.build_query(query)
        if query.model == "alexnet":
            save_weights(example.parent / "open.safetensors", model.state_dict())
        load_weights(query, model)
    line = str(caught.value).replace(f"{example.parent}/", "")
    assert line in page.splitlines()
