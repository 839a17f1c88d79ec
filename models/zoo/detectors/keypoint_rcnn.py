"""Keypoint R-CNN (He et al. 2017), torchvision's: Faster R-CNN with a map of places for each point of an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision.models.detection as detection
from torch import Tensor
from torchvision.models.detection.roi_heads import keypointrcnn_loss
from torchvision.ops import box_iou

from gemel.models.detector import BoxTarget, PoseTarget
from gemel.models.errors import InputError
from gemel.models.preprocess import InputSize
from gemel.models.zoo.detectors.box_ops import rows_where
from gemel.models.zoo.detectors.two_stage import INPUT_SIZE, Regions, TwoStage
from gemel.models.zoo.registry import register

MIN_TAUGHT_SCORE = 0.5
"""Detections of an original from this score on teach points."""
MIN_OVERLAP, MAX_REGIONS = 0.5, 32
"""Proposals that overlap an object by this IoU learn its points, so many in a frame besides the object's own box."""
MIN_CURVE = 1e-6
PoseDetections = tuple[Tensor, Tensor, Tensor, Tensor]


class KeypointRcnn(TwoStage):
    """As TwoStage; in eval mode a fourth output, the points (N, D, K, 3): x and y in fractions, and their scores."""

    has_points = True

    def __init__(
        self, whole: detection.KeypointRCNN, input_size: InputSize, num_keypoints: int
    ) -> None:
        super().__init__(whole, input_size)
        self.num_keypoints = num_keypoints

    def loss(self, outputs: Regions, targets: Sequence[PoseTarget]) -> Tensor:  # type: ignore[override]
        """The losses of Faster R-CNN and that of the points; InputError for another number of points."""
        for target in targets:
            if len(target.points) and target.points.shape[1] != self.num_keypoints:
                problem = f"the labels have {target.points.shape[1]} points, the model has {self.num_keypoints}"
                raise InputError(
                    "keypoints", problem, "set `model_args: {num_keypoints: N}`", "model_args"
                )
        plain = [BoxTarget(target.boxes, target.labels) for target in targets]
        device = outputs.objectness.device
        return super().loss(outputs, plain) + self._point_loss(
            outputs,
            [target.boxes.to(device) for target in targets],
            [target.points.to(device) for target in targets],
        )

    def distill(self, outputs: Regions, teacher: PoseDetections) -> Tensor:  # type: ignore[override]
        """As for Faster R-CNN, and the points of the original's certain detections."""
        boxes, scores, labels, points = teacher
        certain = [score >= MIN_TAUGHT_SCORE for score in scores]
        taught = [frame_points[rows].float() for frame_points, rows in zip(points, certain)]
        seen = [
            torch.cat([frame_points[..., :2], torch.ones_like(frame_points[..., 2:])], dim=-1)
            for frame_points in taught
        ]
        own_boxes = [frame_boxes[rows].float() for frame_boxes, rows in zip(boxes, certain)]
        return super().distill(outputs, (boxes, scores, labels)) + self._point_loss(
            outputs, own_boxes, seen
        )

    def _detect(self, features: Sequence[Tensor], proposals: Tensor, objectness: Tensor) -> Any:
        boxes, scores, labels = super()._detect(features, proposals, objectness)
        return boxes, scores, labels, self._find_points(features, boxes, scores)

    def _find_points(self, features: Sequence[Tensor], boxes: Tensor, scores: Tensor) -> Tensor:
        """The place of the largest value of each map, by a parabola between cells; its score is the value's sigmoid."""
        frames, proposals_each = scores.shape
        live = rows_where((scores > 0).flatten())
        live_boxes = boxes.flatten(0, 1)[live]
        frame = (live // proposals_each).to(live_boxes.dtype)[:, None]
        maps = self._maps(
            features, torch.cat([frame, live_boxes * self.extent.on(live_boxes.device)], dim=1)
        ).float()
        side = maps.shape[-1]
        best, cell = maps.flatten(2).max(dim=2)
        row = cell // side
        column = cell % side
        x, y = (self._refine(maps, row, column, side, axis) for axis in (1, 0))
        spans = live_boxes[:, None, 2:] - live_boxes[:, None, :2]
        starts = live_boxes[:, None, :2]
        places = starts + torch.stack([x, y], dim=-1) / side * spans
        points = places.new_zeros((frames * proposals_each, self.num_keypoints, 3))
        points[live] = torch.cat([places, best.sigmoid()[..., None]], dim=-1)
        return points.unflatten(0, (frames, proposals_each))

    @staticmethod
    def _refine(maps: Tensor, row: Tensor, column: Tensor, side: int, axis: int) -> Tensor:
        """The maximum along an axis (0 rows, 1 columns), in cells: the vertex of the parabola through three of them."""
        at = column if axis else row

        def value(place: Tensor) -> Tensor:
            place = place.clamp(0, side - 1)
            cell = row * side + place if axis else place * side + column
            return maps.flatten(2).gather(2, cell[..., None]).squeeze(2)

        before = value(at - 1)
        middle = value(at)
        after = value(at + 1)
        curve = (2 * middle - before - after).clamp(min=MIN_CURVE)
        return at + 0.5 + ((after - before) / (2 * curve)).clamp(-0.5, 0.5)

    def _maps(self, features: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Logits (R, K, 56, 56) of places in rois (R, 5): frame, x0, y0, x1, y1 in pixels."""
        if torch.compiler.is_exporting():
            torch._check(rois.shape[0] > 0)
        heads = self.roi_heads
        pooled = self._pool(features, rois, heads.keypoint_roi_pool)
        return heads.keypoint_predictor(heads.keypoint_head(pooled))

    def _point_loss(
        self, outputs: Regions, boxes: Sequence[Tensor], points: Sequence[Tensor]
    ) -> Tensor:
        """Cross-entropy of the places in the objects' boxes, and in proposals that overlap them."""
        rois = []
        matched = []
        extent = self.extent.on(outputs.objectness.device)
        for objects, proposals, scores in zip(boxes, outputs.proposals, outputs.scores):
            pixels = objects * extent
            picked = proposals[scores >= 0] if len(objects) else proposals[:0]
            overlap, row = (
                box_iou(picked, pixels).max(dim=1)
                if len(picked)
                else (proposals[:0, 0], proposals[:0, 0].long())
            )
            near = (overlap >= MIN_OVERLAP).nonzero().squeeze(1)[:MAX_REGIONS]
            rois.append(torch.cat([pixels, picked[near]]))
            matched.append(
                torch.cat([torch.arange(len(objects), device=objects.device), row[near]])
            )
        if not sum(map(len, rois)):
            return outputs.objectness.sum() * 0
        frames = torch.cat(
            [torch.full_like(regions[:, :1], index) for index, regions in enumerate(rois)]
        )
        maps = self._maps(outputs.features, torch.cat([frames, torch.cat(rois)], dim=1))
        targets = [
            torch.cat([object_points[..., :2] * extent[:2], object_points[..., 2:]], dim=-1)
            for object_points in points
        ]
        return keypointrcnn_loss(maps, rois, targets, matched)


@register(
    "keypointrcnn_resnet50_fpn",
    task="keypoints",
    input_size=INPUT_SIZE,
    published="keypointrcnn_resnet50_fpn",
)
def keypointrcnn_resnet50_fpn(
    num_classes: int, input_size: InputSize = INPUT_SIZE, num_keypoints: int = 17
) -> KeypointRcnn:
    """Keypoint R-CNN on ResNet-50 with a feature pyramid."""
    whole = detection.keypointrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=num_classes, num_keypoints=num_keypoints
    )
    return KeypointRcnn(whole, input_size, num_keypoints)
