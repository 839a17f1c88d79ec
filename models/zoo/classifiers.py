"""The zoo's classifiers: torchvision's, and the ResNets for CIFAR (He et al. 2016, section 4.2)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.regnet import BlockParams, RegNet

from gemel.models.preprocess import InputSize
from gemel.models.zoo.registry import Factory, register

DEPTHS = (20, 32, 44, 56)
WIDTHS = (16, 32, 64)
LAYERS_PER_BLOCK = 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second cell, new channels zero (option A)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            half = self.new_channels // 2
            x = F.pad(x, (0, 0, 0, 0, half, self.new_channels - half))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """x f32 (N, 3, H, W) -> logits (N, C). State dict keys fit the weights published by Y. Idelbayev
    ("Proper ResNet Implementation for CIFAR10/CIFAR100 in PyTorch").
    """

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // (LAYERS_PER_BLOCK * len(WIDTHS))
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], blocks, stride=1)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], blocks, stride=2)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], blocks, stride=2)
        self.linear = nn.Linear(WIDTHS[2], num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    followers = (BasicBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(in_channels, channels, stride), *followers)


def _build(depth: int, num_classes: int, input_size: InputSize = 32) -> CifarResNet:
    return CifarResNet(depth, num_classes)


for _depth in DEPTHS:
    register(f"cifar_resnet{_depth}", task="classification", input_size=32, width=10)(
        partial(_build, _depth)
    )


PLAIN = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)), "resnext50_32x4d", "wide_resnet50_2",
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    "alexnet", "squeezenet1_0", "squeezenet1_1", "densenet121", "convnext_tiny", "swin_t",
    "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "efficientnet_b0", "efficientnet_b3",
)  # fmt: skip
"""Classifiers of torchvision that take frames of many sizes, as they are."""


def build_classifier(
    name: str, num_classes: int, input_size: InputSize, **model_args: Any
) -> nn.Module:
    """A classifier of torchvision's with random weights; these networks take frames of many sizes."""
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **model_args)


def register_classifier(name: str, factory: Factory, **keys: Any) -> None:
    """Enter a model of torchvision's at the input size that its published weights were made for."""
    published = torchvision.models.get_model_weights(name)["DEFAULT"]
    size = published.transforms().crop_size[0]
    register(name, task="classification", input_size=size, published=name, **keys)(factory)


for _name in PLAIN:
    register_classifier(_name, partial(build_classifier, _name))


HALF = (0.5, 0.5, 0.5)
AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}


def _build_inception(
    name: str, num_classes: int, input_size: InputSize, **model_args: Any
) -> nn.Module:
    # init_weights states torchvision's own default, which it warns about when left open.
    return build_classifier(
        name, num_classes, input_size, aux_logits=False, init_weights=True, **model_args
    )


for _name, _auxiliary in AUXILIARY.items():
    register_classifier(
        _name, partial(_build_inception, _name), scaling=(HALF, HALF), auxiliary=_auxiliary
    )


SQUEEZE_RATIO = 0.25
STAGES = {
    "regnet_y_400mf": ((1, 3, 6, 6), (48, 104, 208, 440), 8),
    "regnet_y_8gf": ((2, 4, 10, 1), (224, 448, 896, 2016), 56),
}
"""Depth and width of each stage, and the width of a group: as published, because torchvision computes the stages
with tensors and so cannot build these networks on the meta device."""


def _build_regnet(
    name: str, num_classes: int, input_size: InputSize, **model_args: Any
) -> nn.Module:
    depths, widths, group = STAGES[name]
    count = len(depths)
    stages = BlockParams(
        list(depths), list(widths), [group] * count, [1.0] * count, [2] * count, SQUEEZE_RATIO
    )
    norm_layer = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1)
    return RegNet(stages, num_classes, norm_layer=norm_layer, **model_args)


for _name in STAGES:
    register_classifier(_name, partial(_build_regnet, _name))


PATCH = 16


def vit_b_16(num_classes: int, input_size: InputSize, **model_args: Any) -> nn.Module:
    """ViT-B/16; its position embedding is made for one input size, a multiple of 16 pixels (else ValueError)."""
    if not isinstance(input_size, int):
        raise ValueError(
            f"input_size {list(input_size)} is no square, which its position embedding is made for"
        )
    if input_size % PATCH:
        near = max(PATCH, round(input_size / PATCH) * PATCH)
        raise ValueError(
            f"input_size {input_size} is no multiple of {PATCH}, as its patches need; {near} is"
        )
    return build_classifier(
        "vit_b_16", num_classes, input_size, image_size=input_size, **model_args
    )


register_classifier("vit_b_16", vit_b_16)
