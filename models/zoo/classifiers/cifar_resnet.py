"""The ResNets of the paper's CIFAR-10 experiments (He et al. 2016, section 4.2): 20 to 56 layers for 32 x 32 frames."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from models.zoo.registry import register

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
    """x f32 (N, 3, S, S) -> logits (N, C). State dict keys fit the weights published by Y. Idelbayev
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
    rest = (BasicBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(in_channels, channels, stride), *rest)


def _build(depth: int, num_classes: int, input_size: int = 32) -> CifarResNet:
    return CifarResNet(depth, num_classes)


for _depth in DEPTHS:
    register(f"cifar_resnet{_depth}", task="classification", input_size=32, width=10)(partial(_build, _depth))
