"""The zoo's detectors: torchvision's two SSDs, and SSDs on MobileNetV2, SqueezeNet and ResNet-18."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torchvision
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.ops.misc import Conv2dNormActivation

from gemel.models.preprocess import InputSize, height_width
from gemel.models.zoo.detectors.single_stage import SingleStage, map_shapes, single_stage, spread
from gemel.models.zoo.registry import register

SCALES = (0.06, 0.5)
"""Default boxes as fractions of the frame's side: vehicles of 12 to 120 pixels on a 352x288 traffic camera."""
ASPECT_RATIOS = (2.0,)
NORM = partial(nn.BatchNorm2d, eps=1e-3)


class MobileNetV2Maps(nn.Module):
    """MobileNetV2 at strides 8, 16 and 32, and one more map at 64 (Sandler et al. 2018, section 6.2).

    Strides 8 and 16 are taken where the next block has widened them: 192 and 576 channels instead of 32 and 96.
    """

    WIDENED = (7, 14)

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision.models.mobilenet_v2(weights=None).features
        self.extra = nn.ModuleList([_extra_block(1280, 256)])

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        maps = []
        for index, block in enumerate(self.features):
            if index in self.WIDENED:
                assert isinstance(block, InvertedResidual)
                maps.append(block.conv[0](x))
                x = block.conv[1:](maps[-1])
            else:
                x = block(x)
        return _number_maps([*maps, x], self.extra)


class SqueezeNetMaps(nn.Module):
    """SqueezeNet 1.0 at strides 8 and 16, and more maps at 32 and 64."""

    TAKEN = (10, 12)

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision.models.squeezenet1_0(weights=None).features
        self.extra = nn.ModuleList([_extra_block(512, 256), _extra_block(256, 256)])

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        maps = []
        for index, block in enumerate(self.features):
            x = block(x)
            if index in self.TAKEN:
                maps.append(x)
        return _number_maps(maps, self.extra)


def _number_maps(maps: list[Tensor], extra: nn.ModuleList) -> OrderedDict[str, Tensor]:
    for block in extra:
        maps.append(block(maps[-1]))
    return OrderedDict((str(index), feature_map) for index, feature_map in enumerate(maps))


def _extra_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Halves the map: 1x1, depthwise 3x3 with stride 2, 1x1 (torchvision's SSDLite)."""
    half = out_channels // 2
    block = partial(Conv2dNormActivation, norm_layer=NORM, activation_layer=nn.ReLU6)
    return nn.Sequential(
        block(in_channels, half, kernel_size=1),
        block(half, half, kernel_size=3, stride=2, groups=half),
        block(half, out_channels, kernel_size=1),
    )


def _resnet18_maps() -> IntermediateLayerGetter:
    """ResNet-18 at strides 8, 16 and 32; its layers keep torchvision's names."""
    return IntermediateLayerGetter(
        torchvision.models.resnet18(weights=None), {f"layer{n}": f"layer{n}" for n in (2, 3, 4)}
    )


def _build_lite(
    make_backbone: Callable[[], nn.Module],
    num_classes: int,
    input_size: InputSize,
    scales: Sequence[float] = SCALES,
    aspect_ratios: Sequence[float] = ASPECT_RATIOS,
) -> SingleStage:
    """An SSD with light heads; a torchvision state dict of the backbone fits under `backbone.`."""
    backbone = make_backbone()
    maps = len(map_shapes(backbone, input_size))
    ratios: Any = [list(aspect_ratios)] * maps
    generator = DefaultBoxGenerator(ratios, scales=spread(scales, maps))
    return single_stage(
        backbone,
        lambda channels, boxes: SSDLiteHead(channels, boxes, num_classes, NORM),
        generator,
        input_size,
    )


for _name, _size, _make in (
    ("ssdlite320_mobilenet_v2", 320, MobileNetV2Maps),
    ("ssd320_squeezenet1_0", 320, SqueezeNetMaps),
    ("ssd_resnet18", 192, _resnet18_maps),
):
    register(_name, task="detection", input_size=_size)(partial(_build_lite, _make))


@register(
    "ssdlite320_mobilenet_v3_large",
    task="detection",
    scaling=((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    input_size=320,
    published="ssdlite320_mobilenet_v3_large",
)
def ssdlite320_mobilenet_v3_large(
    num_classes: int, input_size: InputSize = 320, scales: Sequence[float] | None = None
) -> SingleStage:
    """torchvision's SSDLite320 on MobileNetV3; its COCO weights fit when there are 91 classes."""
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=num_classes
    )
    generator: Any = model.anchor_generator
    if scales is not None:
        generator = DefaultBoxGenerator(generator.aspect_ratios, scales=spread(scales, 6))
    return single_stage(model.backbone, lambda channels, boxes: model.head, generator, input_size)


_VGG_SCALING = ((0.48235, 0.45882, 0.40784), (1 / 255, 1 / 255, 1 / 255))


@register(
    "ssd300_vgg16", task="detection", scaling=_VGG_SCALING, input_size=300, published="ssd300_vgg16"
)
def ssd300_vgg16(
    num_classes: int, input_size: InputSize = 300, scales: Sequence[float] | None = None
) -> SingleStage:
    """torchvision's SSD300 on VGG-16 (Liu et al. 2016); its COCO weights fit when there are 91 classes."""
    model = torchvision.models.detection.ssd300_vgg16(
        weights=None, weights_backbone=None, num_classes=num_classes
    )
    generator: Any = model.anchor_generator
    if scales is not None or height_width(input_size) != (300, 300):
        chosen = generator.scales if scales is None else spread(scales, 6)
        # The published steps only tile a frame of 300 pixels; without them boxes are laid by the maps' own sizes.
        steps = generator.steps if height_width(input_size) == (300, 300) else None
        generator = DefaultBoxGenerator(generator.aspect_ratios, scales=chosen, steps=steps)
    return single_stage(model.backbone, lambda channels, boxes: model.head, generator, input_size)
