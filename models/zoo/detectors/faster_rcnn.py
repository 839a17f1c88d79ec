"""Faster R-CNN: torchvision's on feature pyramids, and ResNets with a single map (Ren et al. 2015)."""

from __future__ import annotations

from typing import Any

import torchvision
import torchvision.models.detection as detection
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import MultiScaleRoIAlign

from models.zoo.detectors.two_stage import TwoStage
from models.zoo.registry import register

SIZES = (32, 64, 128, 256, 512)
RATIOS = (0.5, 1.0, 2.0)
INPUT_SIZE = 800


class SingleMap(nn.Module):
    """A ResNet up to layer4: one map of 2048 channels at stride 32, or at 16 with its last stage dilated."""

    out_channels = 2048

    def __init__(self, name: str, dilated: bool) -> None:
        super().__init__()
        whole = torchvision.models.get_model(name, weights=None, replace_stride_with_dilation=[False, False, dilated])
        self.body = IntermediateLayerGetter(whole, {"layer4": "0"})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.body(x)


def _two_stage(whole: detection.FasterRCNN, input_size: int, anchor_scale: float) -> TwoStage:
    generator: Any = whole.rpn.anchor_generator
    sizes = tuple(tuple(size * anchor_scale for size in level) for level in generator.sizes)
    whole.rpn.anchor_generator = AnchorGenerator(sizes, generator.aspect_ratios)
    return TwoStage(whole, input_size)


def _published(name: str, input_size: int) -> None:
    builder = getattr(detection, name)

    @register(name, task="detection", input_size=input_size, published=name)
    def build(num_classes: int, input_size: int = input_size, anchor_scale: float = 1.0) -> TwoStage:
        whole = builder(weights=None, weights_backbone=None, num_classes=num_classes)
        return _two_stage(whole, input_size, anchor_scale)


def _single_map(name: str, num_classes: int, input_size: int, anchor_scale: float, dilated: bool) -> TwoStage:
    whole = detection.FasterRCNN(
        SingleMap(name, dilated),
        num_classes,
        rpn_anchor_generator=AnchorGenerator((SIZES,), (RATIOS,)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2),
    )
    return _two_stage(whole, input_size, anchor_scale)


_published("fasterrcnn_resnet50_fpn", INPUT_SIZE)
_published("fasterrcnn_resnet50_fpn_v2", INPUT_SIZE)
_published("fasterrcnn_mobilenet_v3_large_fpn", INPUT_SIZE)
_published("fasterrcnn_mobilenet_v3_large_320_fpn", 320)


@register("fasterrcnn_resnet101_fpn", task="detection", input_size=INPUT_SIZE)
def fasterrcnn_resnet101_fpn(num_classes: int, input_size: int = INPUT_SIZE, anchor_scale: float = 1.0) -> TwoStage:
    """As torchvision's fasterrcnn_resnet50_fpn, on ResNet-101."""
    backbone = resnet_fpn_backbone(
        backbone_name="resnet101", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    return _two_stage(detection.FasterRCNN(backbone, num_classes), input_size, anchor_scale)


@register("fasterrcnn_resnet50_c5", task="detection", input_size=INPUT_SIZE)
def fasterrcnn_resnet50_c5(
    num_classes: int, input_size: int = INPUT_SIZE, anchor_scale: float = 1.0, dilated: bool = False
) -> TwoStage:
    """Faster R-CNN on layer4 of ResNet-50 alone, 15 anchors a cell."""
    return _single_map("resnet50", num_classes, input_size, anchor_scale, dilated)


@register("fasterrcnn_resnet101_c5", task="detection", input_size=INPUT_SIZE)
def fasterrcnn_resnet101_c5(
    num_classes: int, input_size: int = INPUT_SIZE, anchor_scale: float = 1.0, dilated: bool = False
) -> TwoStage:
    """Faster R-CNN on layer4 of ResNet-101 alone, 15 anchors a cell."""
    return _single_map("resnet101", num_classes, input_size, anchor_scale, dilated)
