"""Every model of the zoo has exactly as many parameters as were published for it.

Sources: torchvision records `num_params` beside each of its published weights. Models it does not have are sums of
published parts and of heads derived here by hand, or come from their authors, as stated at each.

Where torchvision's detectors freeze the norms of their backbone (FrozenBatchNorm2d: all `COCO_V1` on a pyramid or a
single map), scale and shift are buffers there and missing from its count. Here these norms are trained like all
others, so their two numbers per channel are added. The `_v2` detectors were published with norms that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torchvision

from models import zoo
from models.zoo.registry import ENTRIES

COCO, IMAGENET = 91, 1000


def conv(inputs: int, outputs: int, kernel: int = 1, bias: bool = False, groups: int = 1) -> int:
    """Parameters of a square convolution."""
    return inputs // groups * outputs * kernel**2 + outputs * bias


def norm(channels: int) -> int:
    """A norm's scale and shift."""
    return 2 * channels


def linear(inputs: int, outputs: int) -> int:
    """A linear layer with bias."""
    return inputs * outputs + outputs


def torchvisions(name: str) -> int:
    """What torchvision recorded for the oldest weights of this model."""
    return next(iter(torchvision.models.get_model_weights(name))).meta["num_params"]


def resnet_norms(blocks: Sequence[int]) -> int:
    """The norms of a ResNet with bottlenecks (He et al. 2016, table 1): stem, three to a block, one to a shortcut."""
    stages = sum(count * (width + width + 4 * width) + 4 * width for count, width in zip(blocks, (64, 128, 256, 512)))
    return norm(64 + stages)


def mobilenet_v3_large_norms() -> int:
    """The norms of MobileNetV3-Large (Howard et al. 2019, table 1): expansion, depthwise and output of each block."""
    expansions = (16, 64, 72, 72, 120, 120, 240, 200, 184, 184, 480, 672, 672, 960, 960)
    outputs = (16, 24, 24, 40, 40, 40, 80, 80, 80, 80, 112, 112, 160, 160, 160)
    first_is_not_expanded = expansions[0]
    return norm(16 + 2 * sum(expansions) - first_is_not_expanded + sum(outputs) + 960)


RESNET50, RESNET101 = (3, 4, 6, 3), (3, 4, 23, 3)
FROZEN_NORMS = {
    "fasterrcnn_resnet50_fpn": resnet_norms(RESNET50),
    "fasterrcnn_mobilenet_v3_large_fpn": mobilenet_v3_large_norms(),
    "fasterrcnn_mobilenet_v3_large_320_fpn": mobilenet_v3_large_norms(),
    "retinanet_resnet50_fpn": resnet_norms(RESNET50),
    "fcos_resnet50_fpn": resnet_norms(RESNET50),
}
AUXILIARY_HEADS = {
    # torchvision's count of GoogLeNet is without its auxiliary heads already.
    "inception_v3": conv(768, 128) + norm(128) + conv(128, 768, 5) + norm(768) + linear(768, IMAGENET),
}


def single_map(resnet: str) -> int:
    """A ResNet without its classifier, an RPN of 15 anchors a cell, and two linear layers over 7x7 of its 2048 channels
    before class and box (Ren et al. 2015, with torchvision's box head).
    """
    backbone = torchvisions(resnet) - linear(2048, IMAGENET)
    proposals = conv(2048, 2048, 3, bias=True) + conv(2048, 15, bias=True) + conv(2048, 4 * 15, bias=True)
    box_head = linear(2048 * 7 * 7, 1024) + linear(1024, 1024) + linear(1024, COCO) + linear(1024, 4 * COCO)
    return backbone + proposals + box_head


def lite_head(channels: Sequence[int], boxes: int = 4) -> int:
    """SSDLite's head (Sandler et al. 2018): on each map a depthwise 3x3, norm and 1x1, for classes and boxes."""
    depthwise = sum(conv(c, c, 3, groups=c) + norm(c) for c in channels)
    outputs = sum(conv(c, boxes * COCO, bias=True) + conv(c, boxes * 4, bias=True) for c in channels)
    return 2 * depthwise + outputs


def extra_map(inputs: int, outputs: int) -> int:
    """SSDLite's extra layer: 1x1 to half, depthwise 3x3, 1x1, each with a norm."""
    half = outputs // 2
    return (
        conv(inputs, half)
        + norm(half)
        + conv(half, half, 3, groups=half)
        + norm(half)
        + conv(half, outputs)
        + norm(outputs)
    )


def cifar_resnet(depth: int) -> int:
    """He et al. 2016, section 4.2: 6n + 2 layers, 16 to 64 channels, shortcuts without parameters, 10 classes."""
    blocks, total, inputs = (depth - 2) // 6, conv(3, 16, 3) + norm(16) + linear(64, 10), 16
    for width in (16, 32, 64):
        total += conv(inputs, width, 3) + (2 * blocks - 1) * conv(width, width, 3) + 2 * blocks * norm(width)
        inputs = width
    return total


COMPOSED = {
    "ssdlite320_mobilenet_v2": torchvisions("mobilenet_v2")
    - linear(1280, IMAGENET)
    + extra_map(1280, 256)
    + lite_head((192, 576, 1280, 256)),
    "ssd320_squeezenet1_0": torchvisions("squeezenet1_0")
    - conv(512, IMAGENET, bias=True)
    + extra_map(512, 256)
    + extra_map(256, 256)
    + lite_head((512, 512, 256, 256)),
    "ssd_resnet18": torchvisions("resnet18") - linear(512, IMAGENET) + lite_head((128, 256, 512)),
    "fasterrcnn_resnet101_fpn": torchvisions("fasterrcnn_resnet50_fpn")
    + resnet_norms(RESNET50)
    + torchvisions("resnet101")
    - torchvisions("resnet50"),
    "fasterrcnn_resnet50_c5": single_map("resnet50"),
    "fasterrcnn_resnet101_c5": single_map("resnet101"),
}
"""Models composed here of published parts, at COCO's 91 classes."""

AUTHORS = {
    # Darknet's yolov3.cfg and yolov3-tiny.cfg at COCO's 80 classes (Redmon and Farhadi 2018), statistics apart.
    "yolov3": 61_949_149,
    "yolov3_tiny": 8_852_366,
    **{f"cifar_resnet{depth}": cifar_resnet(depth) for depth in (20, 32, 44, 56)},
}
MILLIONS = {
    # He et al. 2016, table 6.
    "cifar_resnet20": "0.27",
    "cifar_resnet32": "0.46",
    "cifar_resnet44": "0.66",
    "cifar_resnet56": "0.85",
    # The table in FastestDet's own README, at COCO's 80 classes.
    "fastestdet": "0.24",
}
"""What was published rounded to two digits."""


def published(name: str) -> int | None:
    """The parameters of a zoo model as published; None when only a rounded number is known, or nothing."""
    known = AUTHORS.get(name) or COMPOSED.get(name)
    builder = ENTRIES[name].published
    if known is not None or builder is None:
        return known
    return torchvisions(builder) + FROZEN_NORMS.get(name, 0) - AUXILIARY_HEADS.get(name, 0)


def parameters(name: str) -> int:
    """Parameters of a zoo model at the class count it was published with, counted on the meta device."""
    entry = ENTRIES[name]
    model = zoo.build(name, entry.width, {}, entry.input_size, entry.task, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_are_as_many_as_published(name: str) -> None:
    exact, millions, count = published(name), MILLIONS.get(name), parameters(name)
    assert exact or millions, f"state here what was published for {name}"
    assert exact in (None, count)
    assert millions in (None, f"{count / 1e6:.2f}")


def test_the_tables_name_no_model_that_the_zoo_lacks() -> None:
    known = {*FROZEN_NORMS, *AUXILIARY_HEADS, *COMPOSED, *AUTHORS, *MILLIONS}
    assert known <= set(zoo.names())
