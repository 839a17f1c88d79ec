"""The zoo's segmentation networks, torchvision's: LR-ASPP, DeepLabV3 and FCN."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
import torchvision.models.segmentation as segmentation
from torch import Tensor, nn

from gemel.models.zoo.registry import register

NAMES = (
    "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "deeplabv3_resnet101",
    "fcn_resnet50", "fcn_resnet101",
)  # fmt: skip
INPUT_SIZE = 520
AUXILIARY = "aux_classifier."


class Segmenter(nn.Module):
    """x f32 (N, 3, H, W) -> logits (N, C, H, W), one class a pixel. State dict keys are torchvision's."""

    def __init__(self, whole: Any, takes_all_features: bool) -> None:
        super().__init__()
        self.backbone = whole.backbone
        self.classifier = whole.classifier
        self.takes_all_features = takes_all_features

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        logits = self.classifier(features if self.takes_all_features else features["out"])
        return F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


def _build(name: str, num_classes: int, input_size: Any = INPUT_SIZE) -> Segmenter:
    whole = getattr(segmentation, name)(
        weights=None, weights_backbone=None, num_classes=num_classes, aux_loss=False
    )
    return Segmenter(whole, takes_all_features=name.startswith("lraspp"))


for _name in NAMES:
    register(
        _name, task="segmentation", input_size=INPUT_SIZE, published=_name, auxiliary=(AUXILIARY,)
    )(partial(_build, _name))
