"""Darknet's weights files: what is read from where, and one line for each that does not fit."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from models.darknet import DarknetLayer, read_darknet
from models.errors import InputError


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
