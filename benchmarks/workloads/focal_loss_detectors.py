"""RetinaNet (Lin et al. 2017) and FCOS (Tian et al. 2019), torchvision's, and their distillation: factories
of the catalogue's workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
import torchvision.models.detection as detection
from torch import Tensor

from gemel.models.detector import BoxTarget, OneStage
from gemel.models.preprocess import InputSize
from gemel.models.zoo.detectors.box_ops import (
    FixedBoxes,
    anchors_of,
    box_extent,
    decode_boxes,
    pixel_targets,
    scale_anchors,
)
from gemel.models.zoo.detectors.single_stage import map_shapes

from .box_losses import divergence


def distill_focal(logits: Tensor, teacher_logits: Tensor, box_distance: Tensor) -> Tensor:
    """Divergence of the classes' probabilities and `box_distance` (N, A), where an object is believed to be.

    Logits (N, A, C), one sigmoid per class. A location is weighted by the larger of both models' object probabilities,
    a box by the original's; the sum is divided by the original's total. Probabilities are squared as in the focal loss
    (Lin et al. 2017), since such detectors leave a few per cent everywhere.
    """
    target = teacher_logits.sigmoid()
    seen = target.amax(dim=-1).square()
    imagined = logits.detach().sigmoid().amax(dim=-1).square()
    classes = divergence(logits, teacher_logits).sum(dim=-1)
    return (classes * seen.maximum(imagined) + box_distance * seen).sum() / seen.sum().clamp(min=1)


class FocalDetector(OneStage):
    """A torchvision detector with a focal loss, without pre- and postprocessing."""

    most_candidates = 1000

    def __init__(self, whole: detection.FCOS | detection.RetinaNet, input_size: InputSize) -> None:
        super().__init__()
        self.backbone = whole.backbone
        self.head: Any = whole.head
        self.extent = box_extent(input_size)
        self.grids = [shape[1:] for shape in map_shapes(self.backbone, input_size).values()]
        self.anchors = FixedBoxes(anchors_of(whole.anchor_generator, input_size, self.grids))


FcosOutputs = tuple[Tensor, Tensor, Tensor]


class Fcos(FocalDetector):
    """torchvision's FCOS: one location per cell, no anchors' shapes to choose.

    `forward`: x f32 (N, 3, H, W) -> logits (N, A, C + 1), of which torchvision never uses the first, distances to the
    four sides in strides (N, A, 4), and centerness logits (N, A, 1). State dict keys are torchvision's.
    """

    nms_iou = 0.6

    def __init__(self, whole: detection.FCOS, input_size: InputSize) -> None:
        super().__init__(whole, input_size)
        self.center_sampling_radius = whole.center_sampling_radius
        self.locations = [height * width for height, width in self.grids]

    def forward(self, x: Tensor) -> FcosOutputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"], outputs["bbox_ctrness"]

    def decode(self, outputs: FcosOutputs) -> tuple[Tensor, Tensor]:
        """The score is the geometric mean of a class's probability and the centerness, as in torchvision."""
        logits, distances, centerness = outputs
        scores = (logits[..., 1:].float().sigmoid() * centerness.float().sigmoid()).sqrt()
        boxes = self.head.box_coder.decode(distances.float(), self.anchors.on(distances.device))
        return boxes / self.extent.on(boxes.device), scores

    def loss(self, outputs: FcosOutputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes, generalised IoU of the boxes, cross-entropy of the centerness."""
        logits, distances, centerness = outputs
        named = {"cls_logits": logits, "bbox_regression": distances, "bbox_ctrness": centerness}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.extent, logits.device)
        losses = detection.FCOS.compute_loss(cast(Any, self), wanted, named, anchors, self.locations)
        return losses["classification"] + losses["bbox_regression"] + losses["bbox_ctrness"]

    def distill(self, outputs: FcosOutputs, teacher: FcosOutputs) -> Tensor:
        """Distance from the original's outputs, see `distill_focal`.

        Of the boxes, smooth L1 of the distances, and the cross-entropy of the centerness above its least.
        """
        logits, distances, centerness = outputs
        teacher_logits, teacher_distances, teacher_centerness = teacher
        apart = F.smooth_l1_loss(distances, teacher_distances, reduction="none").sum(dim=-1)
        off_centre = divergence(centerness, teacher_centerness).squeeze(-1)
        return distill_focal(logits[..., 1:], teacher_logits[..., 1:], apart + off_centre)


def fcos_resnet50_fpn(num_classes: int, input_size: InputSize = 800) -> Fcos:
    """FCOS on ResNet-50 with a feature pyramid."""
    whole = detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=num_classes)
    return Fcos(whole, input_size)


RETINANET_BOX_CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
RetinaNetOutputs = tuple[Tensor, Tensor]


class RetinaNet(FocalDetector):
    """torchvision's RetinaNet.

    `forward`: x f32 (N, 3, H, W) -> logits (N, A, C + 1), of which torchvision never uses the first, and box deltas
    (N, A, 4). State dict keys are torchvision's: `backbone.*` and `head.*`.
    """

    nms_iou = 0.5

    def __init__(self, whole: detection.RetinaNet, input_size: InputSize) -> None:
        super().__init__(whole, input_size)
        self.proposal_matcher = whole.proposal_matcher

    def forward(self, x: Tensor) -> RetinaNetOutputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def decode(self, outputs: RetinaNetOutputs) -> tuple[Tensor, Tensor]:
        logits, deltas = outputs
        boxes = decode_boxes(deltas.float(), self.anchors.on(deltas.device), RETINANET_BOX_CODE_WEIGHTS)
        return boxes / self.extent.on(boxes.device), logits[..., 1:].float().sigmoid()

    def loss(self, outputs: RetinaNetOutputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes plus L1 (version 2: generalised IoU) of the boxes, as torchvision sums them."""
        logits, deltas = outputs
        named = {"cls_logits": logits, "bbox_regression": deltas}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.extent, logits.device)
        losses = detection.RetinaNet.compute_loss(cast(Any, self), wanted, named, anchors)
        return losses["classification"] + losses["bbox_regression"]

    def distill(self, outputs: RetinaNetOutputs, teacher: RetinaNetOutputs) -> Tensor:
        """Distance from the original's outputs, see `distill_focal`; of the boxes, smooth L1 of the deltas."""
        logits, deltas = outputs
        teacher_logits, teacher_deltas = teacher
        distance = F.smooth_l1_loss(deltas, teacher_deltas, reduction="none").sum(dim=-1)
        return distill_focal(logits[..., 1:], teacher_logits[..., 1:], distance)


def _build_retinanet(builder: Any, num_classes: int, input_size: InputSize, anchor_scale: float) -> RetinaNet:
    """RetinaNet on ResNet-50 with a feature pyramid; anchors of 32 to 813 pixels, times `anchor_scale`."""
    whole = builder(weights=None, weights_backbone=None, num_classes=num_classes)
    whole.anchor_generator = scale_anchors(whole.anchor_generator, anchor_scale)
    return RetinaNet(whole, input_size)


def retinanet_resnet50_fpn(num_classes: int, input_size: InputSize = 800, anchor_scale: float = 1.0) -> RetinaNet:
    """RetinaNet as published."""
    return _build_retinanet(detection.retinanet_resnet50_fpn, num_classes, input_size, anchor_scale)


def retinanet_resnet50_fpn_v2(num_classes: int, input_size: InputSize = 800, anchor_scale: float = 1.0) -> RetinaNet:
    """RetinaNet as torchvision trains it anew."""
    return _build_retinanet(detection.retinanet_resnet50_fpn_v2, num_classes, input_size, anchor_scale)
