"""YOLOv3 and Tiny YOLOv3: darknet's network computed another way, boxes by hand, and that they learn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemel.models import zoo
from gemel.models.cost import flops
from gemel.models.darknet import read_darknet
from gemel.models.tensors import as_arrays
from gemel.models.zoo.detectors.yolov3 import YOLOv3, assign
from tests.parameters import every

COCO = [f"class{index}" for index in range(80)]

# Darknet's cfg files: cFILTERS[.SIZE][/STRIDE] with a norm and a leaky ReLU, o(utput), m(axpool)/STRIDE, s(hortcut
# from three layers before), r(oute)LAYERS, u(psample), y(olo).
BACKBONE = (
    "c32 c64/2 c32.1 c64 s c128/2" + " c64.1 c128 s" * 2 + " c256/2" + " c128.1 c256 s" * 8
    + " c512/2" + " c256.1 c512 s" * 8 + " c1024/2" + " c512.1 c1024 s" * 4
)  # fmt: skip
CFG = {
    "yolov3": BACKBONE + " c512.1 c1024" * 3 + " o y r-4 c256.1 u r-1,61" + " c256.1 c512" * 3
    + " o y r-4 c128.1 u r-1,36" + " c128.1 c256" * 3 + " o y",
    "yolov3_tiny": "c16 m/2 c32 m/2 c64 m/2 c128 m/2 c256 m/2 c512 m/1 c1024 c256.1 c512 o y"
    " r-4 c128.1 u r-1,8 c256 o y",
}  # fmt: skip
PUBLISHED = {
    "yolov3": (61_949_149, 248_007_048, 65.86),
    "yolov3_tiny": (8_852_366, 35_434_956, 5.56),
}
"""Parameters; bytes of the published weights file, a header of 20 and four for each value; 10^9 operations at 416."""


def model_of(name: str, classes: int = 80, size: int = 416, device: str = "cpu", **args) -> YOLOv3:
    model = zoo.build(name, COCO[:classes], args, size, "detection", device=device)
    assert isinstance(model, YOLOv3)
    return model.eval()


def run_darknet(cfg: str, x: Tensor, values: Tensor, outputs: int) -> list[Tensor]:
    """A darknet that follows the cfg layer by layer and takes the values of its weights file one after the other."""
    start = 0

    def take(*shape: int) -> Tensor:
        nonlocal start
        start += int(np.prod(shape))
        return values[start - int(np.prod(shape)) : start].view(shape)

    layers, maps = [x], []
    for token in cfg.split():
        x = layers[-1]
        if token[0] in "co":
            filters, size, stride = re.fullmatch(r"[co](\d*)\.?(\d*)/?(\d*)", token).groups()  # type: ignore[union-attr]
            kernel = int(size or (3 if filters else 1))
            channels = int(filters or outputs)
            if token[0] == "c":
                beta, gamma, mean, var = (take(channels) for _ in range(4))
                x = F.conv2d(x, take(channels, x.shape[1], kernel, kernel), None, int(stride or 1), kernel // 2)
                x = (x - mean.view(-1, 1, 1)) / (var + 1e-5).sqrt().view(-1, 1, 1)
                x = x * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1)
                x = torch.where(x > 0, x, 0.1 * x)
            else:
                bias = take(channels)
                x = F.conv2d(x, take(channels, x.shape[1], 1, 1), bias)
                maps.append(x)
        elif token == "m/2":
            x = F.max_pool2d(x, 2)
        elif token == "m/1":
            wide = torch.full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1), -torch.inf)
            wide[:, :, :-1, :-1] = x
            x = F.max_pool2d(wide, 2, stride=1)
        elif token == "s":
            x = x + layers[-3]
        elif token == "u":
            x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        elif token[0] == "r":
            # layers[0] is the frame, so that layer k of the cfg is layers[k + 1].
            chosen = [int(index) for index in token[1:].split(",")]
            x = torch.cat([layers[index if index < 0 else index + 1] for index in chosen], dim=1)
        layers.append(x)
    assert start == len(values)
    return maps


def random_values(model: YOLOv3, seed: int = 0) -> Tensor:
    """What a weights file of this architecture could hold, such that signals neither die nor grow."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for layer in model.darknet_layers():
        weight = model.get_parameter(f"{layer.conv}.weight")
        if layer.norm is None:
            parts.append(torch.randn(len(weight), generator=generator))
        else:
            parts += [torch.randn(len(weight), generator=generator) * 0.1 for _ in range(3)]
            parts[-2] = parts[-2] + 0.7
            parts.append(torch.rand(len(weight), generator=generator) + 0.5)
        deviation = (2 / weight[0].numel()) ** 0.5
        parts.append(torch.randn(weight.numel(), generator=generator) * deviation)
    return torch.cat(parts)


@pytest.mark.parametrize("name", CFG)
def test_yolov3_has_the_published_sizes(name):
    model = model_of(name, device="meta")
    parameters, file_bytes, operations = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    state = [tensor for key, tensor in model.state_dict().items() if not key.endswith("num_batches_tracked")]
    assert 20 + 4 * sum(tensor.numel() for tensor in state) == file_bytes
    assert flops(model, 416) / 1e9 == pytest.approx(operations, abs=0.01)


@pytest.mark.parametrize("name", every(CFG, ["yolov3_tiny"]))
def test_yolov3_computes_as_darknet(name, tmp_path: Path):
    model = model_of(name, classes=2, size=64)
    values = random_values(model)
    path = tmp_path / "random.weights"
    path.write_bytes(np.array([0, 2, 0, 0, 0], dtype="<i4").tobytes() + values.numpy().tobytes())
    missing, unknown = model.load_state_dict(read_darknet(path, model), strict=False)
    assert not unknown and all(key.endswith("num_batches_tracked") for key in missing)
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        maps = model(x)
        expected = run_darknet(CFG[name], x, values, outputs=21)
    assert len(maps) == len(expected)
    for ours, theirs in zip(maps, expected):
        assert theirs.std() > 0.01
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_yolov3_decodes_as_published():
    model = model_of("yolov3_tiny", classes=3, size=416, device="meta")
    coarse, fine = torch.full((1, 24, 13, 13), -20.0), torch.full((1, 24, 26, 26), -20.0)
    # Row 4, column 7 of the coarse map, its second anchor, 135 x 169: objectness 0.5, class 2 at 0.5.
    coarse[0, 8:16, 4, 7] = torch.tensor([0.0, 0.0, 0.0, np.log(2), 0.0, -20.0, -20.0, 0.0])
    boxes, scores = model.decode((coarse, fine))
    assert boxes.shape == (1, 13 * 13 * 3 + 26 * 26 * 3, 4)
    row = (4 * 13 + 7) * 3 + 1
    assert scores[0].argmax() == row * 3 + 2
    assert float(scores[0, row, 2]) == pytest.approx(0.25)
    x, y, width, height = 7.5 / 13, 4.5 / 13, 135 / 416, 2 * 169 / 416
    expected = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    assert boxes[0, row].tolist() == pytest.approx(expected, abs=1e-6)
    found = model.reader.candidates(as_arrays((boxes, scores)), 0.1)[0]
    assert found.labels.tolist() == [2]
    assert found.boxes[0].tolist() == pytest.approx([max(0, value) for value in expected], abs=1e-6)


def test_yolov3_assigns_the_anchor_of_the_objects_shape():
    model = model_of("yolov3", classes=1, device="meta")
    maps = model(torch.zeros(1, 3, 416, 416, device="meta"))
    maps = tuple(torch.zeros(each.shape) for each in maps)
    box = torch.tensor([[200 - 8, 100 - 15, 200 + 8, 100 + 15]]) / 416
    answers = assign(model.priors(maps), box).nonzero()
    first_fine = (13 * 13 + 26 * 26) * 3
    assert answers.tolist() == [[0, first_fine + (100 // 8 * 52 + 200 // 8) * 3 + 1]]


def test_yolov3_distill_is_zero_at_the_teacher():
    model = model_of("yolov3_tiny", classes=2, device="meta")
    generator = torch.Generator().manual_seed(0)
    teacher = tuple(torch.randn(2, 21, side, side, generator=generator) for side in (13, 26))
    assert float(model.distill(teacher, teacher)) == pytest.approx(0, abs=1e-5)
    for channel in (0, 2, 4, 6):
        changed = [each.clone() for each in teacher]
        changed[1][:, channel] += 1
        assert float(model.distill(tuple(changed), teacher)) > 0.01
