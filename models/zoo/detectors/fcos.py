"""FCOS (Tian et al. 2019), torchvision's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
import torchvision.models.detection as detection
from torch import Tensor

from models.detector import BoxTarget, OneStage
from models.zoo.detectors.boxes import FixedBoxes, anchors_of
from models.zoo.detectors.losses.focal import distill_focal, pixel_targets
from models.zoo.detectors.single_stage import map_shapes
from models.zoo.registry import register

Outputs = tuple[Tensor, Tensor, Tensor]


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

    def forward(self, x: Tensor) -> Outputs:
        outputs = self.head(list(self.backbone(x).values()))
        return outputs["cls_logits"], outputs["bbox_regression"], outputs["bbox_ctrness"]

    def decode(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """The score is the geometric mean of a class's probability and the centerness, as in torchvision."""
        logits, distances, centerness = outputs
        scores = (logits[..., 1:].float().sigmoid() * centerness.float().sigmoid()).sqrt()
        boxes = self.head.box_coder.decode(distances.float(), self.anchors.on(distances.device))
        return boxes / self.input_size, scores

    def loss(self, outputs: Outputs, targets: Sequence[BoxTarget]) -> Tensor:
        """Focal loss of the classes, generalised IoU of the boxes, cross-entropy of the centerness."""
        logits, distances, centerness = outputs
        named = {"cls_logits": logits, "bbox_regression": distances, "bbox_ctrness": centerness}
        anchors = [self.anchors.on(logits.device)] * len(targets)
        wanted = pixel_targets(targets, self.input_size, logits.device)
        losses = detection.FCOS.compute_loss(cast(Any, self), wanted, named, anchors, self.locations)
        return losses["classification"] + losses["bbox_regression"] + losses["bbox_ctrness"]

    def distill(self, outputs: Outputs, teacher: Outputs) -> Tensor:
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
