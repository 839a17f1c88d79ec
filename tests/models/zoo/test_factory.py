"""A user's own models, `package.module:factory` beside the workload: found, built, and refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

from models import zoo
from models.errors import InputError
from models.sharing.layers import layers_of
from models.weights import load_weights, save_weights
from models.workload import Query, load_workload

HEADER = "import torch\nfrom torch import nn\n"
NET = """
class Net(nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))
"""


def ask(folder: Path, source: str, model: str = "models:make", task: str = "classification", **keys) -> Query:
    """A query of a workload in `folder` whose model lies beside it in models.py."""
    (folder / "models.py").write_text(HEADER + source)
    query = {"id": "gate", "camera": "c", "task": task, "classes": ["car", "none"], "model": model, "input_size": 32,
             "weights": "gate.safetensors", **keys}  # fmt: skip
    document = {"name": "own", "cameras": {"c": {"source": "c.mp4"}}, "queries": [query]}
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_workload(path).query("gate")


def refusal(query: Query, device: str = "cpu") -> str:
    """The error of building the query's model."""
    with pytest.raises(InputError) as caught:
        zoo.build_query(query, device)
    assert "\n" not in str(caught.value) and caught.value.hint
    return str(caught.value)


def test_factory_beside_the_workload_is_found(tmp_path) -> None:
    source = f"{NET}\ndef make(num_classes, width):\n    return Net(num_classes, width)"
    query = ask(tmp_path, source, model_args={"width": 6})
    model = zoo.build_query(query)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 2)
    assert [layer.path for layer in layers_of(query)] == ["conv", "fc"]
    assert [layer.head for layer in layers_of(query)] == [False, True]
    assert str(tmp_path) not in sys.path


MAKE = "def make(num_classes):\n    net = Net(num_classes)\n    {}\n    return net\n"
BAD = {
    "raises": (
        "def make(num_classes):\n    raise KeyError('stem')",
        "cannot be built: KeyError: 'stem' (models.py, line 4); correct the factory",
    ),
    "no module": ("def make(num_classes):\n    return [1]", "the factory returned list; it must return a torch nn."),
    "missing": (NET + "def build(num_classes):\n    return Net(2)", "models has no 'make'; name a function"),
    "misspelt": (NET + "def makes(num_classes):\n    return Net(2)", "models has no 'make'; did you mean makes?"),
    "no function": ("make = 3", "make cannot be called"),
    "syntax": ("def make(:", "cannot be imported: SyntaxError"),
    "import": ("import no_such_library\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_lib"),
    "other class count": (
        NET + "def make(num_classes):\n    return Net(10)",
        "answers with 10 classes where 2 were asked for",
    ),
    "a tuple": (
        NET + "class Two(Net):\n    def forward(self, x):\n        return super().forward(x), x\n"
        "def make(num_classes):\n    return Two(num_classes)", "answers one frame with a tuple, not with logits (1, 2)",
    ),
    "tied": (
        NET + MAKE.format("net.other = nn.Linear(4, 2); net.other.weight = net.fc.weight"),
        "fc.weight and other.weight are one tensor; give other.weight a parameter of its own: "
        "nn.Parameter(fc.weight.detach().clone())",
    ),
    "not contiguous": (
        NET + MAKE.format("net.to(memory_format=torch.channels_last)"),
        "conv.weight is not contiguous (shape (4, 3, 3, 3), strides (27, 1, 9, 3)); store conv.weight as .contiguous()",
    ),
    "expanded": (
        NET + MAKE.format("net.fc.bias = nn.Parameter(torch.zeros(1).expand(num_classes))"),
        "fc.bias is not contiguous (shape (2,), strides (0,))",
    ),
    "argument": (NET + "def make():\n    return Net(2)", "cannot be built: TypeError: make() takes 0 positional"),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD)
def test_invalid_factory_is_refused_in_one_line(tmp_path, case: str, device: str) -> None:
    source, fault = BAD[case]
    line = refusal(ask(tmp_path, source), device)
    assert line.startswith(f"{tmp_path / 'workload.yaml'}: ")
    assert "(gate): models:make: " in line
    assert fault in line


def test_load_weights_checks_the_input_size_and_keeps_modes(tmp_path) -> None:
    source = NET + "def make(num_classes):\n    net = Net(num_classes)\n    net.conv.eval()\n    return net"
    query = ask(tmp_path, source)
    model = zoo.build_query(query)
    save_weights(tmp_path / "gate.safetensors", model.state_dict())
    load_weights(query, model)
    assert model.training and model.fc.training and not model.conv.training  # type: ignore[union-attr]
    deep = NET.replace("Conv2d(3, width, 3)", "Conv2d(3, width, 40)") + "make = Net"
    (tmp_path / "deep").mkdir()
    query = ask(tmp_path / "deep", deep)
    model = zoo.build_query(query)
    save_weights(tmp_path / "deep" / "gate.safetensors", model.state_dict())
    with pytest.raises(
        InputError, match=r"workload.yaml: input_size \(gate\): models:make: cannot take frames of 32x32"
    ):
        load_weights(query, model)


@pytest.mark.parametrize("model", ["models.py:make", "models:", "a:b:c", "../models:make"])
def test_workload_with_an_invalid_factory_name_is_refused(tmp_path, model: str) -> None:
    with pytest.raises(InputError, match=r"is no name of a factory; write it as package\.module:factory"):
        ask(tmp_path, "", model)
