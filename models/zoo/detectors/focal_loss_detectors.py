"""RetinaNet (Lin et al. 2017) and FCOS (Tian et al. 2019), torchvision's, and their distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
import torchvision.models.detection as detection
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator

from models.detector import BoxTarget, OneStage
from models.zoo.detectors.box_ops import FixedBoxes, anchors_of, decode_boxes
from models.zoo.detectors.single_stage import map_shapes
from models.zoo.registry import register


def pixel_targets(targets: Sequence[BoxTarget], input_size: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Targets with boxes in pixels of the input and labels as torchvision counts them, from 1."""
    return [
        {"boxes": target.boxes.to(device) * input_size, "labels": target.labels.to(device) + 1} for target in targets
    ]


def distill_focal(logits: Tensor, teacher_logits: Tensor, box_distance: Tensor) -> Tensor:
    """Divergence of the classes' probabilities and `box_distance` (N, A), where an object is believed to be.

    Logits (N, A, C), one sigmoid per class. A location is weighted by the larger of both models' object probabilities,
    a box by the original's; the sum is divided by the original's total. Probabilities are squared as in the focal loss
    (Lin et al. 2017), since such detectors leave a few per cent everywhere.
    """
    target = teacher_logits.sigmoid()
    seen = target.amax(dim=-1).square()
    imagined = logits.detach().sigmoid().amax(dim=-1).square()
    entropy = F.binary_cross_entropy_with_logits(teacher_logits, target, reduction="none")
    divergence = (F.binary_cross_entropy_with_logits(logits, target, reduction="none") - entropy).sum(dim=-1)
    return (divergence * seen.maximum(imagined) + box_distance * seen).sum() / seen.sum().clamp(min=1)


FcosOutputs = tuple[Tensor, Tensor, Tensor]


class Fcos(OneStage):
    """torchvision's FCOS without pre- and postprocessing: one location per cell, no anchors' shapes to choose.

    `forward`: x f32 (N, 3, S, S) -> logits (N, A, C + 1), of which torchvision never uses the first, distances to the
    four sides in strides (N, A, 4), and centerness logits (N, A, 1). State dict keys are torchvision's.
    """

    nms_iou = 0.6
    most_candidates = 1000

    def __init__(self, whole: detection.FCOS, input_size: int) -> None:
        super().__init__()
        self.backbone = whole.backbone
        self.head: Any = whole.head
        self.center_sampling_radius = whole.center_sampling_radius
        self.input_size = input_size
        grids = [shape[1:] for shape in map_shapes(self.backbone, input_size).values()]
        self.locations = [height * width for height, width in grids]
        self.anchors = FixedBoxes(anchors_of(whole.anchor_generator, input_size, grids))

    def forward(self, x: Tensor) -> FcosOutputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"], outputs["bbox_ctrness"]

    def decode(self, outputs: FcosOutputs) -> tuple[Tensor, Tensor]:
        """The score is the geometric mean of a class's probability and the centerness, as in torchvision."""
        logits, distances, centerness = outputs
        scores = (logits[..., 1:].float().sigmoid() * centerness.float().sigmoid()).sqrt()
        boxes = self.head.box_coder.decode(distances.float(), self.anchors.on(distances.device))
        return boxes / self.input_size, scores

    def loss(self, outputs: FcosOutputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes, generalised IoU of the boxes, cross-entropy of the centerness."""
        logits, distances, centerness = outputs
        named = {"cls_logits": logits, "bbox_regression": distances, "bbox_ctrness": centerness}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.input_size, logits.device)
        losses = detection.FCOS.compute_loss(cast(Any, self), wanted, named, anchors, self.locations)
        return losses["classification"] + losses["bbox_regression"] + losses["bbox_ctrness"]

    def distill(self, outputs: FcosOutputs, teacher: FcosOutputs) -> Tensor:
        """Distance from the original's outputs, see `distill_focal`.

        Of the boxes, smooth L1 of the distances, and the cross-entropy of the centerness above its least.
        """
        logits, distances, centerness = outputs
        teacher_logits, teacher_distances, teacher_centerness = teacher
        apart = F.smooth_l1_loss(distances, teacher_distances, reduction="none").sum(dim=-1)
        wanted = teacher_centerness.sigmoid()
        least = F.binary_cross_entropy_with_logits(teacher_centerness, wanted, reduction="none")
        off_centre = F.binary_cross_entropy_with_logits(centerness, wanted, reduction="none") - least
        return distill_focal(logits[..., 1:], teacher_logits[..., 1:], apart + off_centre.squeeze(-1))


@register("fcos_resnet50_fpn", task="detection", input_size=800, published="fcos_resnet50_fpn")
def fcos_resnet50_fpn(num_classes: int, input_size: int = 800) -> Fcos:
    """FCOS on ResNet-50 with a feature pyramid."""
    whole = detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=num_classes)
    return Fcos(whole, input_size)


RETINANET_BOX_CODE_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
RetinaNetOutputs = tuple[Tensor, Tensor]


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

    def forward(self, x: Tensor) -> RetinaNetOutputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def decode(self, outputs: RetinaNetOutputs) -> tuple[Tensor, Tensor]:
        logits, deltas = outputs
        boxes = decode_boxes(deltas.float(), self.anchors.on(deltas.device), RETINANET_BOX_CODE_WEIGHTS)
        return boxes / self.input_size, logits[..., 1:].float().sigmoid()

    def loss(self, outputs: RetinaNetOutputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes plus L1 (version 2: generalised IoU) of the boxes, as torchvision sums them."""
        logits, deltas = outputs
        named = {"cls_logits": logits, "bbox_regression": deltas}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.input_size, logits.device)
        losses = detection.RetinaNet.compute_loss(cast(Any, self), wanted, named, anchors)
        return losses["classification"] + losses["bbox_regression"]

    def distill(self, outputs: RetinaNetOutputs, teacher: RetinaNetOutputs) -> Tensor:
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
