"""Rectangular inputs: detectors of the zoo against torchvision's own, training, augmentation, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision

from gemel.models import zoo
from gemel.models.batchnorm import recalibrate_batchnorm
from gemel.models.detector import BoxTarget
from gemel.models.errors import InputError
from gemel.models.preprocess import Size
from gemel.models.tensors import as_arrays

torch.set_num_threads(1)
CLASSES = ("car", "bus")
SIZE: Size = (128, 192)
TARGETS = [BoxTarget(torch.tensor([[0.1, 0.2, 0.5, 0.8]]), torch.tensor([1]))] * 2
FAMILIES = (
    "ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn",
)  # fmt: skip


def blur_noise() -> torch.Tensor:
    noise = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    return F.interpolate(noise, size=SIZE, mode="bilinear")


@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_loss_in_a_rectangle_is_torchvisions(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, CLASSES, {}, SIZE, "detection").eval()
    recalibrate_batchnorm(model, [blur_noise()])
    fixed = {"min_size": SIZE[0], "max_size": SIZE[1], "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    with torch.device("meta"):
        builder = getattr(torchvision.models.detection, name)
        theirs = builder(weights=None, weights_backbone=None, num_classes=len(CLASSES) + 1, **fixed)
    theirs.load_state_dict(model.state_dict(), assign=True)
    theirs.train().transform.torch_choice = lambda sizes: sizes[0]
    pixels = TARGETS[0].boxes * torch.tensor([SIZE[1], SIZE[0]] * 2)
    with torch.no_grad():
        wanted = sum(theirs(list(blur_noise()), [{"boxes": pixels, "labels": TARGETS[0].labels + 1}] * 2).values())
        found = model.train().loss(model(blur_noise()), TARGETS)  # type: ignore[operator]
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)


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
