"""FastestDet: the authors' own network beside it, boxes by hand, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch

from gemel.models import zoo
from gemel.models.detector import BoxTarget
from gemel.models.zoo.detectors.fastestdet import FastestDet

COCO = [f"class{index}" for index in range(80)]


def model_of(classes: int = 80, size: int = 352, device: str = "cpu") -> FastestDet:
    model = zoo.build("fastestdet", COCO[:classes], {}, size, "detection", device=device)
    assert isinstance(model, FastestDet)
    return model.eval()


def test_fastestdet_has_the_published_shapes():
    model = model_of(device="meta")
    (output,) = model(torch.zeros(2, 3, 352, 352, device="meta"))
    assert output.shape == (2, 85, 22, 22)
    boxes, scores = model.decode((output,))
    assert boxes.shape == (2, 484, 4) and scores.shape == (2, 484, 80)


def test_fastestdet_decodes_as_published():
    output = torch.full((1, 8, 6, 6), -20.0)
    # Row 2, column 4: half a cell to the right, a quarter up, a quarter wide, half high; class 1 of 3.
    values = [0.0, math.atanh(0.5), math.atanh(-0.25), -math.log(3), 0.0, 0.0, math.log(2), 0.0]
    output[0, :, 2, 4] = torch.tensor(values)
    boxes, scores = model_of(classes=3, device="meta").decode((output,))
    assert scores[0, 16].tolist() == pytest.approx([0.125, 0.25, 0.125])
    x, y = 4.5 / 6, 1.75 / 6
    assert boxes[0, 16].tolist() == pytest.approx([x - 0.125, y - 0.25, x + 0.125, y + 0.25])


def test_fastestdet_loss_is_zero_for_a_perfect_answer():
    model = model_of(classes=2, device="meta")
    target = [BoxTarget(torch.tensor([[0.25, 0.25, 0.75, 0.75]]), torch.tensor([1]))]

    def loss(objectness: float = 20.0, side: float = 0.0, label: float = 20.0, elsewhere: float = -20.0) -> float:
        output = torch.zeros(1, 7, 6, 6)
        output[:, 0] = elsewhere
        # The centre lies where cell (3, 3) begins; the boxes of the other three that may answer are a cell off.
        output[0, :, 3, 3] = torch.tensor([objectness, 0.0, 0.0, side, side, -label, label])
        return model.loss((output,), target).item()

    assert loss() == pytest.approx(0, abs=1e-4)
    assert loss(objectness=-20) > 1
    assert loss(side=-2) > 1
    assert loss(label=-20) > 10
    assert loss(elsewhere=20) > 1


def test_fastestdet_distill_is_zero_at_the_teacher():
    model = model_of(classes=2, device="meta")
    teacher = torch.randn(2, 7, 6, 6, generator=torch.Generator().manual_seed(0))
    assert model.distill((teacher,), (teacher,)).item() == pytest.approx(0, abs=1e-5)
    for channel in (0, 1, 3, 5):
        changed = teacher.clone()
        changed[:, channel] += 1
        assert model.distill((changed,), (teacher,)).item() > 0.01
