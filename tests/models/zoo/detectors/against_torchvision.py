"""What the tests of the detector families share: frames, weights that give varied answers, a few steps of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from gemel.models import zoo
from gemel.models.batchnorm import recalibrate_batchnorm
from gemel.models.detector import BoxTarget, Detector

CLASSES = ("car", "bus")
SIZE = 128


def detector(name: str, size: int = SIZE, **model_args: Any) -> Any:
    """A seeded detector of two classes in eval mode, whose norms have the statistics of `frames`."""
    torch.manual_seed(0)
    model = zoo.build(name, CLASSES, model_args, size, "detection").eval()
    assert isinstance(model, Detector)
    recalibrate_batchnorm(model, [frames(size)])
    return model


def torchvisions(model: Any, name: str, size: int = SIZE) -> Any:
    """torchvision's own model with this one's weights, taking normalised frames of that size."""
    fixed = {"min_size": size, "max_size": size, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    with torch.device("meta"):
        builder = getattr(torchvision.models.detection, name)
        whole = builder(weights=None, weights_backbone=None, num_classes=len(CLASSES) + 1, **fixed)
    whole.load_state_dict(model.state_dict(), assign=True)
    whole.transform.torch_choice = lambda sizes: sizes[0]  # drawn from the generator that samples anchors too
    return whole.eval()


def frames(size: int = SIZE, count: int = 2) -> Tensor:
    """Blurred noise, f32 (count, 3, size, size)."""
    noise = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return F.interpolate(noise, size=(size, size), mode="bilinear")


def squares(size: int = SIZE) -> tuple[Tensor, list[BoxTarget]]:
    """Two dark frames with one bright rectangle each, and where it is."""
    boxes = torch.tensor([[0.15, 0.25, 0.55, 0.65], [0.45, 0.30, 0.85, 0.75]])
    images = torch.full((2, 3, size, size), -1.0)
    for image, box in zip(images, (boxes * size).long().tolist()):
        image[:, box[1] : box[3], box[0] : box[2]] = 2.0
    return images, [BoxTarget(box[None], torch.tensor([label])) for label, box in enumerate(boxes)]


def as_torchvision(targets: list[BoxTarget], size: int = SIZE) -> list[dict[str, Tensor]]:
    """Targets in pixels, labels from 1."""
    return [{"boxes": target.boxes * size, "labels": target.labels + 1} for target in targets]


def descend(model: Any, images: Tensor, loss: Callable[[Any], Tensor], steps: int, rate: float = 3e-4) -> list[float]:
    """Losses of a few steps in train mode; the model is left in eval mode, its norms measured anew."""
    torch.manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, steps)
    model.train()
    losses = []
    for _ in range(steps):
        value = loss(model(images))
        optimiser.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        schedule.step()
        losses.append(value.item())
    model.eval()
    recalibrate_batchnorm(model, [images])
    return losses
