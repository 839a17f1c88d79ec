"""A user's own models, `package.module:factory` beside the workload: found, built, and refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

from gemel.models import zoo
from gemel.models.errors import InputError
from gemel.models.files.weights import load_weights, save_weights
from gemel.models.sharing.layers import layers_of
from gemel.models.workload import Query, load_workload

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
    "fixed head": (
        NET + "def make():\n    return Net(10)",
        "answers with 10 classes where 2 were asked for: its factory takes no `num_classes`, so its head is fixed; "
        "list its 10 classes, or make its last layer `num_classes` wide",
    ),
    "TorchScript": (
        NET + "def make(num_classes):\n    return torch.jit.script(Net(num_classes))",
        "the factory returned TorchScript, whose layers cannot be shared; export it as .onnx",
    ),
    "TorchScript within": (
        NET + "def make(num_classes):\n    return nn.Sequential(torch.jit.script(Net(num_classes)))",
        "the factory returned TorchScript",
    ),
    "a tuple": (
        NET + "class Two(Net):\n    def forward(self, x):\n        return super().forward(x), x\n"
        "def make(num_classes):\n    return Two(num_classes)",
        "answers two frames with a tuple, not with logits (2, 2)",
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
    "argument": (
        NET + "def make(classes, width):\n    return Net(2)",
        "cannot be built: TypeError: make() missing 2 required positional arguments: 'classes' and 'width'; "
        "it takes (classes, width): num_classes and input_size are given by these names, the others by model_args",
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", BAD)
def test_invalid_factory_is_refused_in_one_line(tmp_path, case: str, device: str) -> None:
    source, fault = BAD[case]
    line = refusal(ask(tmp_path, source), device)
    assert line.startswith(f"{tmp_path / 'workload.yaml'}: ")
    assert "(gate): models:make: " in line
    assert fault in line


TAKES = {
    "no class count": "():\n    return Net(2)",
    "the class count by keyword": "(*, width=4, num_classes=7):\n    return Net(num_classes, width)",
    "another first parameter": "(name='n', num_classes=7):\n    assert name == 'n'\n    return Net(num_classes)",
    "any keyword": "(name='n', **keys):\n    assert name == 'n' and 'input_size' not in keys\n    return Net(**keys)",
    "the input size": "(num_classes, input_size):\n    return Net(num_classes, input_size)",
    "a wrapped function": "(*args, **keys):\n    return Net(*args, **keys)\nmake.__wrapped__ = Net",
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKES)
def test_factory_gets_by_keyword_what_it_takes(tmp_path, kind: str) -> None:
    model = zoo.build_query(ask(tmp_path, f"{NET}\ndef make{TAKES[kind]}"))
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 2)


def test_factory_of_torchvision_starts_no_download(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *_, **__: pytest.fail("a download"))
    assert zoo.build_query(ask(tmp_path, "", "torchvision.models:resnet18")).fc.out_features == 2  # type: ignore[union-attr]


def test_factory_of_timm_gets_its_name_by_model_args(tmp_path) -> None:
    pytest.importorskip("timm")
    args = {"model_name": "test_resnet"}
    assert zoo.build_query(ask(tmp_path, "", "timm:create_model", model_args=args)).num_classes == 2


KEEPS = {
    "a tensor": ("None", "self.kept is None", "self.kept = torch.ones_like(x)", "self.kept"),
    "in a dict": ("{}", "not self.kept", "self.kept['x'] = torch.ones_like(x)", "self.kept['x']"),
}


@pytest.mark.parametrize("kind", KEEPS)
def test_forward_may_keep_tensors_for_later_calls(tmp_path, kind: str) -> None:
    start, test, keep, kept = KEEPS[kind]
    source = f"""
class Keeps(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.kept = {start}

    def forward(self, x):
        if {test}:
            {keep}
        return super().forward(x * {kept})
"""
    query = ask(tmp_path, NET + source, "models:Keeps")
    model = zoo.build_query(query)
    zoo.check_input(query, model)
    assert model(torch.rand(2, 3, 32, 32)).isfinite().all()


def test_check_input_refuses_a_model_of_one_frame_at_a_time(tmp_path) -> None:
    source = NET + "class One(Net):\n    def forward(self, x):\n        return super().forward(x.view(3, 32, 32)[None])"
    query = ask(tmp_path, source, "models:One")
    with pytest.raises(InputError, match=r"takes one frame at a time, not two \(RuntimeError.*batches \(N, 3, H, W\)"):
        zoo.check_input(query, zoo.build_query(query))


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
