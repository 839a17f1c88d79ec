"""RetinaNet (Lin et al. 2017), torchvision's two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
import torchvision.models.detection as detection
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator

from models.detector import BoxTarget, OneStage
from models.zoo.detectors.boxes import FixedBoxes, anchors_of, decode_boxes
from models.zoo.detectors.losses.focal import distill_focal, pixel_targets
from models.zoo.detectors.single_stage import map_shapes
from models.zoo.registry import register

BOX_CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
Outputs = tuple[Tensor, Tensor]


class RetinaNet(OneStage):
    """torchvision's RetinaNet without pre- and postprocessing.

    `forward`: x f32 (N, 3, S, S) -> logits (N, A, C + 1), of which torchvision never uses the first, and box deltas
    (N, A, 4). State dict keys are torchvision's: `backbone.*` and `head.*`.
    """

    nms_iou = 0.5
    most_candidates = 1000

    def __init__(self, whole: detection.RetinaNet, input_size: int) -> None:
        super().__init__()
        self.backbone = whole.backbone
        self.head: Any = whole.head
        self.proposal_matcher = whole.proposal_matcher
        self.input_size = input_size
        grids = [shape[1:] for shape in map_shapes(self.backbone, input_size).values()]
        self.anchors = FixedBoxes(anchors_of(whole.anchor_generator, input_size, grids))

    def forward(self, x: Tensor) -> Outputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def decode(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        logits, deltas = outputs
        boxes = decode_boxes(deltas.float(), self.anchors.on(deltas.device), BOX_CODE_WEIGHTS)
        return boxes / self.input_size, logits[..., 1:].float().sigmoid()

    def loss(self, outputs: Outputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes plus L1 (version 2: generalised IoU) of the boxes, as torchvision sums them."""
        logits, deltas = outputs
        named = {"cls_logits": logits, "bbox_regression": deltas}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.input_size, logits.device)
        losses = detection.RetinaNet.compute_loss(cast(Any, self), wanted, named, anchors)
        return losses["classification"] + losses["bbox_regression"]

    def distill(self, outputs: Outputs, teacher: Outputs) -> Tensor:
        """Distance from the original's outputs, see `distill_focal`; of the boxes, smooth L1 of the deltas."""
        logits, deltas = outputs
        teacher_logits, teacher_deltas = teacher
        distance = F.smooth_l1_loss(deltas, teacher_deltas, reduction="none").sum(dim=-1)
        return distill_focal(logits[..., 1:], teacher_logits[..., 1:], distance)


def _retinanet(builder: Any, num_classes: int, input_size: int, anchor_scale: float) -> RetinaNet:
    whole = builder(weights=None, weights_backbone=None, num_classes=num_classes)
    generator = whole.anchor_generator
    sizes = tuple(tuple(size * anchor_scale for size in level) for level in generator.sizes)
    whole.anchor_generator = AnchorGenerator(sizes, generator.aspect_ratios)
    return RetinaNet(whole, input_size)


@register("retinanet_resnet50_fpn", task="detection", input_size=800, published="retinanet_resnet50_fpn")
def retinanet_resnet50_fpn(num_classes: int, input_size: int = 800, anchor_scale: float = 1.0) -> RetinaNet:
    """RetinaNet on ResNet-50 with a feature pyramid; anchors of 32 to 813 pixels, times `anchor_scale`."""
    return _retinanet(detection.retinanet_resnet50_fpn, num_classes, input_size, anchor_scale)


@register("retinanet_resnet50_fpn_v2", task="detection", input_size=800, published="retinanet_resnet50_fpn_v2")
def retinanet_resnet50_fpn_v2(num_classes: int, input_size: int = 800, anchor_scale: float = 1.0) -> RetinaNet:
    """The improved RetinaNet of torchvision: group norms in the head, boxes learnt by generalised IoU."""
    return _retinanet(detection.retinanet_resnet50_fpn_v2, num_classes, input_size, anchor_scale)
