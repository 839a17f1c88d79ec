"""torchvision's image classifiers: ResNets, VGGs and MobileNets, under torchvision's own names."""

from __future__ import annotations

from functools import partial
from typing import Any

import torchvision
from torch import nn

from models.zoo.registry import register

NAMES = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
)


def _build(name: str, num_classes: int, input_size: int, **model_args: Any) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **model_args)


for _name in NAMES:
    register(_name, task="classification")(partial(_build, _name))
