"""Models of the zoo with random weights whose outputs depend on every layer, and frames for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import zoo
from models.zoo.detectors.box_ops import FixedBoxes
from models.zoo.detectors.two_stage import TwoStage

SCALED = (nn.Conv2d, nn.Linear)
CLASSES = ("a", "b", "c")
TWO_STAGE = "fasterrcnn_mobilenet_v3_large_320_fpn"


def build_lively(name: str, side: int) -> nn.Module:
    """A detector of the zoo with weights that make every layer matter."""
    module = lively(zoo.build(name, CLASSES, {}, side, "detection"), side)
    return separate_anchors(module, side) if isinstance(module, TwoStage) else module


def build_two_stage(num_classes: int, input_size: int) -> nn.Module:
    """The architecture that `build_lively` makes of TWO_STAGE; the factory that a bundle of it names."""
    classes = [str(index) for index in range(1, num_classes)]
    module = zoo.build(TWO_STAGE, classes, {}, input_size, "detection", "meta")
    with torch.device("cpu"):
        return separate_anchors(module, input_size)  # type: ignore[arg-type]


def lively(module: nn.Module, side: int) -> nn.Module:
    """Random weights, each layer's scaled to answer with deviation 1 (Mishkin and Matas 2016), and true statistics.

    So nothing dies out or saturates on the way, and the scores of a detector are spread: no ties. Norms' biases lie
    above 0, since a deep network whose signs are all even odds amplifies its own rounding: 1e-3 in resnet152, against
    float64.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter.flatten(1))
            elif name.endswith("weight"):
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                nn.init.normal_(parameter, std=0.2)
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
            norm.bias.add_(0.5)
        hooks = [part.register_forward_hook(_scale) for part in module.modules() if isinstance(part, SCALED)]
        module.train()(soft_frames(8 if side < 224 else 1, side))
        for norm in norms:  # a channel that was silent here must not amplify rounding elsewhere
            norm.running_var.clamp_(min=0.2)  # type: ignore[union-attr]
        module.eval()(soft_frames(1, side))  # the second stage of a two-stage detector runs in eval mode alone
    for hook in hooks:
        hook.remove()
    for part in module.modules():
        part.__dict__.pop("scaled", None)
    return module.requires_grad_(False)


def _scale(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    if "scaled" in layer.__dict__:  # a head that serves several maps keeps the scale of the first
        return output
    layer.__dict__["scaled"] = True
    deviation = output.std().clamp(min=1e-3)
    for parameter in layer.parameters():
        parameter /= deviation
    return output / deviation


def separate_anchors(module: TwoStage, side: int) -> TwoStage:
    """Give it anchors of its own: inside the frame, all different, larger than a cell of the coarsest map.

    Published anchors reach over the edge of so small a frame. Cut off there, many become slivers that pool to the very
    same features, and which of two equal scores comes first is up to the runtime.
    """
    random = torch.Generator().manual_seed(2)
    sides = 0.4 + 0.4 * torch.rand(len(module.anchors), 2, generator=random)
    corners = (1 - sides) * torch.rand(len(module.anchors), 2, generator=random)
    module.anchors = FixedBoxes(torch.cat([corners, corners + sides], dim=1) * side)
    with torch.no_grad():
        for layer, factor in ((module.rpn.head.bbox_pred, 0.1), (module.roi_heads.box_predictor.cls_score, 0.3)):
            layer.weight *= factor  # proposals stay near their anchors, and no score rounds to 1
            layer.bias *= factor
    return module


def soft_frames(count: int, side: int, seed: int = 1) -> Tensor:
    """Frames with large shapes as well as noise, so that deep networks tell them apart."""
    random = torch.Generator().manual_seed(seed)
    shapes = torch.randn(count, 3, 4, 4, generator=random)
    large = nn.functional.interpolate(shapes, (side, side), mode="bilinear")
    return large + 0.3 * torch.randn(count, 3, side, side, generator=random)
