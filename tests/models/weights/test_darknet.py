"""Darknet's weights files: what is read from where, and one line for each that does not fit."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models import zoo
from models.darknet import DarknetLayer, read_darknet
from models.errors import InputError
from models.weights import load_matching, load_weights
from models.workload import Query


class Net(nn.Module):
    """A convolution with a norm, one with a bias, and an output of 2 x classes channels."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.output = nn.Conv2d(3, 2 * classes, 1)
        self.first = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 3, 1)

    def darknet_layers(self) -> list[DarknetLayer]:
        return [DarknetLayer("first", "norm"), DarknetLayer("second"), DarknetLayer("output", output=True)]


NET_VALUES = (4 * 4 + 4 * 3 * 9) + (3 + 3 * 4) + (4 + 4 * 3)
VERSIONS = [(0, 1, 0), (0, 2, 0), (0, 2, 5)]


def write(path: Path, values: np.ndarray, version: tuple[int, int, int] = (0, 2, 0)) -> Path:
    """A file as darknet writes it: the count of seen images has eight bytes from version 0.2 on."""
    seen = struct.pack("<q" if version >= (0, 2, 0) else "<i", 32_013_312)
    path.write_bytes(struct.pack("<3i", *version) + seen + values.astype("<f4").tobytes())
    return path


@pytest.mark.parametrize("version", VERSIONS)
def test_values_come_in_darknets_order(tmp_path, version):
    tensors = read_darknet(write(tmp_path / "net.weights", np.arange(NET_VALUES), version), Net())
    assert list(tensors) == [
        "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "first.weight",
        "second.bias", "second.weight", "output.bias", "output.weight",
    ]  # fmt: skip
    assert torch.equal(torch.cat([tensor.flatten() for tensor in tensors.values()]), torch.arange(NET_VALUES).float())
    own = Net().state_dict()
    assert all(tensor.shape == own[name].shape for name, tensor in tensors.items())


def test_a_file_of_the_first_convolutions_alone_gives_those(tmp_path):
    tensors = read_darknet(write(tmp_path / "net.conv.1", np.arange(124)), Net())
    assert list(tensors)[-1] == "first.weight"
    assert len(tensors) == 5


def test_a_file_of_another_class_count_gives_outputs_of_its_own_width(tmp_path):
    path = write(tmp_path / "net.weights", np.arange(NET_VALUES + 3 * (1 + 3) * 2))
    tensors = read_darknet(path, Net(classes=2))
    assert tensors["output.weight"].shape == (10, 3, 1, 1)
    assert tensors["output.bias"].tolist() == list(range(139, 149))


def cut(path: Path, values: int, odd_bytes: int = 0) -> Path:
    write(path, np.zeros(values))
    with path.open("ab") as file:
        file.write(b"x" * odd_bytes)
    return path


BAD = {
    "cut within the first layer": (
        lambda p: cut(p, 50),
        "is cut short within first: 105 of 155 values of Net are missing; copy or download it again",
    ),
    "cut within the output": (lambda p: cut(p, 142), "is cut short within output: 13 of 155 values"),
    "cut after the header": (lambda p: cut(p, 0), "is cut short within first: 155 of 155 values"),
    "cut within a value": (lambda p: cut(p, 154, 3), "is cut short: it ends with 3 of a value's 4 bytes"),
    "too long": (lambda p: cut(p, 158), "holds 158 values, 3 more than Net takes; give weights of this architecture"),
    "text": (
        lambda p: p.write_text("[net]\nwidth=416\n"),
        "is no darknet weights file; copy or download it again, or give the file darknet wrote",
    ),
    "pytorch": (lambda p: torch.save({"a": torch.zeros(3)}, p), "is no darknet weights file"),
    "negative version": (lambda p: write(p, np.zeros(155), (0, -2, 0)), "is no darknet weights file"),
    "empty": (lambda p: p.touch(), "is no darknet weights file"),
    "missing": (lambda p: None, "cannot be read: No such file or directory; check the path"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gives_one_line(tmp_path, case):
    make, fault = BAD[case]
    path = tmp_path / "net.weights"
    make(path)
    with pytest.raises(InputError) as caught:
        read_darknet(path, Net(), "weights (gate)")
    line = str(caught.value)
    assert line.startswith(f"{path}: weights (gate): ")
    assert fault in line
    assert "\n" not in line


def test_an_architecture_that_is_not_darknets_is_named(tmp_path):
    with pytest.raises(InputError, match="darknet's weights do not fit Linear; use them with yolov3 or yolov3_tiny"):
        read_darknet(write(tmp_path / "net.weights", np.zeros(5)), nn.Linear(2, 1))


def test_a_query_loads_darknets_weights(tmp_path):
    path, state = tiny_weights(tmp_path, classes=2)
    model = zoo.build("yolov3_tiny", ["car", "bus"], {}, 416, "detection")
    load_weights(query(path, ("car", "bus")), model)
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    assert own["backbone.layers.0.norm.running_var"].min() > 0


def test_a_query_of_other_classes_is_told_so_and_starts_from_the_backbone(tmp_path):
    path, state = tiny_weights(tmp_path, classes=80)
    model = zoo.build("yolov3_tiny", ["car", "bus"], {}, 416, "detection")
    with pytest.raises(InputError, match=r"only the head does not fit the class list .*\(255,\) and should be \(21,"):
        load_weights(query(path, ("car", "bus")), model)
    loaded = load_matching(model, path)
    assert set(state) - set(loaded) == {f"levels.{i}.output.{part}" for i in (0, 1) for part in ("weight", "bias")}
    assert torch.equal(model.get_parameter("levels.1.expand.conv.weight"), state["levels.1.expand.conv.weight"])


def tiny_weights(folder: Path, classes: int) -> tuple[Path, dict[str, Tensor]]:
    """A file of random values for Tiny YOLOv3 and what it holds by name."""
    model = zoo.build("yolov3_tiny", [str(index) for index in range(classes)], {}, 416, "detection", device="meta")
    own = model.state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {}
    assert isinstance(model, nn.Module)
    for layer in model.darknet_layers():  # type: ignore[operator]
        names = [f"{layer.norm}.{part}" for part in ("bias", "weight", "running_mean", "running_var")]
        for name in [*(names if layer.norm else [f"{layer.conv}.bias"]), f"{layer.conv}.weight"]:
            state[name] = torch.rand(own[name].shape, generator=generator) + 0.1
    values = torch.cat([tensor.flatten() for tensor in state.values()]).numpy()
    return write(folder / "tiny.weights", values), state


def query(weights: Path, classes: tuple[str, ...]) -> Query:
    """A query with this weights file."""
    return Query(
        id="gate", camera="bridge", task="detection", classes=classes, model="yolov3_tiny", model_args={},
        input_size=416, weights=weights, init=None, fps=None, sla_ms=100.0, roi=None, min_score=0.0, priority=1,
        data=None, accuracy_target=0.95,
    )  # fmt: skip
