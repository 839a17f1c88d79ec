"""Rectangular inputs: detectors of the zoo against torchvision's own, training, augmentation, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gemel.models import zoo
from gemel.models.detector import BoxTarget
from gemel.models.errors import InputError
from gemel.models.preprocess import Size
from gemel.models.tensors import as_arrays

torch.set_num_threads(1)
CLASSES = ("car", "bus")
SIZE: Size = (128, 192)
TARGETS = [BoxTarget(torch.tensor([[0.1, 0.2, 0.5, 0.8]]), torch.tensor([1]))] * 2
FAMILIES = ("ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn")


def blur_noise() -> torch.Tensor:
    noise = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    return F.interpolate(noise, size=SIZE, mode="bilinear")


@pytest.mark.parametrize("name", FAMILIES)
def test_detector_of_a_rectangle_trains_and_answers_within_it(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, CLASSES, {}, SIZE, "detection").train()
    loss = model.loss(model(blur_noise()), TARGETS)  # type: ignore[operator]
    loss.backward()
    assert torch.isfinite(loss)
    with torch.inference_mode():
        outputs = model.eval().finish_outputs(model(blur_noise()))  # type: ignore[operator]
    frames = model.reader.candidates(as_arrays(outputs), 1e-6)  # type: ignore[union-attr, operator]
    assert len(frames) == 2 and all(((one.boxes >= 0) & (one.boxes <= 1)).all() for one in frames)


@pytest.mark.parametrize(("name", "task", "size"), [
    ("vit_b_16", "classification", (64, 96))
])  # fmt: skip
def test_a_rectangle_that_does_not_fit_is_refused_by_input_size(name: str, task: str, size: Size) -> None:
    with pytest.raises(InputError, match="input_size") as caught:
        zoo.build(name, ["a", "b"], {}, size, task)
    assert caught.value.key == "input_size"
