"""Darknet's weights files: what is read from where, and one line for each that does not fit."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gemel.models.darknet import DarknetLayer, read_darknet
from gemel.models.errors import InputError


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
NAMES = [
    "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "first.weight",
    "second.bias", "second.weight", "output.bias", "output.weight",
]  # fmt: skip


def write(path: Path, values: np.ndarray, version: tuple[int, int, int] = (0, 2, 0), odd_bytes: int = 0) -> Path:
    """A file as darknet writes it: the count of seen images has eight bytes from version 0.2 on."""
    seen = struct.pack("<q" if version >= (0, 2, 0) else "<i", 32_013_312)
    path.write_bytes(struct.pack("<3i", *version) + seen + values.astype("<f4").tobytes() + b"x" * odd_bytes)
    return path


@pytest.mark.parametrize("version", [(0, 1, 0), (0, 2, 0), (0, 2, 5)])
def test_read_darknet_gives_values_in_the_order_of_the_network(tmp_path, version):
    tensors = read_darknet(write(tmp_path / "net.weights", np.arange(NET_VALUES), version), Net())
    assert list(tensors) == NAMES
    assert torch.equal(torch.cat([tensor.flatten() for tensor in tensors.values()]), torch.arange(NET_VALUES).float())
    own = Net().state_dict()
    assert all(tensor.shape == own[name].shape for name, tensor in tensors.items())


def test_read_darknet_gives_the_layers_before_the_end_of_a_partial_file(tmp_path):
    path = write(tmp_path / "net.weights", np.arange(NET_VALUES - 16))
    assert list(read_darknet(path, Net())) == NAMES[:-2]


def test_read_darknet_gives_outputs_of_another_class_count(tmp_path):
    path = write(tmp_path / "net.weights", np.arange(NET_VALUES + 3 * (1 + 3) * 2))
    tensors = read_darknet(path, Net(classes=2))
    assert tensors["output.weight"].shape == (10, 3, 1, 1)
    assert tensors["output.bias"].tolist() == list(range(139, 149))


BAD = {
    "cut within the first layer": (
        lambda p: write(p, np.zeros(50)),
        "is cut short within first: 105 of 155 values of Net are missing; copy or download it again",
    ),
    "cut within the output": (lambda p: write(p, np.zeros(142)), "is cut short within output: 13 of 155 values"),
    "cut within a value": (
        lambda p: write(p, np.zeros(154), odd_bytes=3),
        "is cut short: it ends with 3 of a value's 4 bytes",
    ),
    "too long": (
        lambda p: write(p, np.zeros(158)),
        "holds 158 values, 3 more than Net takes; give weights of this architecture",
    ),
    "text": (
        lambda p: p.write_text("[net]\nwidth=416\n"),
        "is no darknet weights file; copy or download it again, or give the file darknet wrote",
    ),
    "negative version": (lambda p: write(p, np.zeros(155), (0, -2, 0)), "is no darknet weights file"),
    "empty": (lambda p: p.touch(), "is no darknet weights file"),
    "missing": (lambda p: None, "cannot be read: No such file or directory; check the path"),
}


@pytest.mark.parametrize("case", BAD)
def test_read_darknet_refuses_a_bad_file_in_one_line(tmp_path, case):
    make, problem = BAD[case]
    path = tmp_path / "net.weights"
    make(path)
    with pytest.raises(InputError) as caught:
        read_darknet(path, Net(), "weights (gate)")
    line = str(caught.value)
    assert line.startswith(f"{path}: weights (gate): {problem}") and "\n" not in line


def test_read_darknet_refuses_a_module_without_its_layers(tmp_path):
    with pytest.raises(InputError, match="darknet's weights do not fit Linear; use them with yolov3"):
        read_darknet(tmp_path / "net.weights", nn.Linear(1, 1))
