"""RegNetY (Radosavovic et al. 2020, "Designing Network Design Spaces", section 5 and appendix)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torchvision.models.regnet import BlockParams, RegNet

from models.zoo.classifiers.torchvision_nets import register_classifier

SQUEEZE_RATIO = 0.25
STAGES = {
    "regnet_y_400mf": ((1, 3, 6, 6), (48, 104, 208, 440), 8),
    "regnet_y_8gf": ((2, 4, 10, 1), (224, 448, 896, 2016), 56),
}
"""Depth and width of each stage, and the width of a group: as published, because torchvision computes the stages
with tensors and so cannot build these networks on the meta device."""


def _build(name: str, num_classes: int, input_size: int, **model_args: Any) -> nn.Module:
    depths, widths, group = STAGES[name]
    count = len(depths)
    stages = BlockParams(
        depths=list(depths),
        widths=list(widths),
        group_widths=[group] * count,
        bottleneck_multipliers=[1.0] * count,
        strides=[2] * count,
        se_ratio=SQUEEZE_RATIO,
    )
    norm_layer = partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1)
    return RegNet(stages, num_classes, norm_layer=norm_layer, **model_args)


for _name in STAGES:
    register_classifier(_name, partial(_build, _name))
