"""torchvision's convolutional image classifiers, under torchvision's own names and with its state dict keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torchvision
from torch import nn

from models.zoo.registry import Factory, register

RESNETS = (*(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)), "resnext50_32x4d", "wide_resnet50_2")
VGGS = tuple(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn"))
PLAIN = ("alexnet", "squeezenet1_0", "squeezenet1_1", "densenet121")
MOBILE = (
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large"),
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "efficientnet_b0", "efficientnet_b3"),
)
MODERN = ("convnext_tiny",)


def build_classifier(name: str, num_classes: int, input_size: int, **model_args: Any) -> nn.Module:
    """A classifier of torchvision's with random weights; these networks take frames of many sizes."""
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **model_args)


def register_classifier(name: str, factory: Factory, **keys: Any) -> None:
    """Enter a model of torchvision's at the input size that its published weights were made for."""
    published = torchvision.models.get_model_weights(name)["DEFAULT"]
    size = published.transforms().crop_size[0]
    register(name, task="classification", input_size=size, published=name, **keys)(factory)


for _name in (*RESNETS, *VGGS, *PLAIN, *MOBILE, *MODERN):
    register_classifier(_name, partial(build_classifier, _name))
