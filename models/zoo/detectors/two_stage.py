"""Faster R-CNN (Ren et al. 2015) as a graph of tensors: on feature pyramids and on a single map, and its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import torchvision
import torchvision.models.detection as detection
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign, box_iou, roi_align

from gemel.models.detector import BoxTarget, Detector
from gemel.models.preprocess import InputSize, height_width
from gemel.models.zoo.detectors.box_ops import (
    NOTHING,
    FixedBoxes,
    anchors_of,
    box_extent,
    decode_boxes,
    nearest_power,
    pixel_targets,
    rows_at,
    rows_where,
    scale_anchors,
    suppress,
)
from gemel.models.zoo.detectors.single_stage import map_shapes
from gemel.models.zoo.registry import register

BETA = 1 / 9
"""Where smooth L1 turns from a square into a line."""
Target = dict[str, Tensor]


def proposal_loss(
    rpn: Any, objectness: Tensor, deltas: Tensor, anchors: Tensor, targets: Sequence[Target]
) -> Tensor:
    """Loss of objectness logits (N, A) and box deltas (N, A, 4); `rpn` is a RegionProposalNetwork."""
    labels, matched = zip(*(_match(rpn.proposal_matcher, anchors, target) for target in targets))
    positive, negative = (torch.stack(masks).bool() for masks in rpn.fg_bg_sampler(list(labels)))
    sampled = (positive | negative).sum()
    weights = torch.stack([_at(t["weights"], rows) for t, rows in zip(targets, matched)])
    boxes = torch.stack([_at(t["boxes"], rows) for t, rows in zip(targets, matched)])
    chosen = positive | negative
    goals = (weights * positive)[chosen]
    class_loss = F.binary_cross_entropy_with_logits(objectness[chosen], goals)
    encoded = rpn.box_coder.encode_single(
        boxes[positive], anchors.expand(len(targets), -1, -1)[positive]
    )
    return class_loss + _box_loss(deltas[positive], encoded, weights[positive]) / sampled


def region_loss(
    heads: Any,
    proposals: Sequence[Tensor],
    targets: Sequence[Target],
    classify: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Loss of sampled proposals, each (P, 4) in pixels; `classify` gives logits and deltas of rois (R, 5).

    `heads` is a RoIHeads. A region of an object of weight w is taught its class with w and the background with 1 - w.
    """
    picked, matched, labels, encoded = heads.select_training_samples(list(proposals), list(targets))
    frames = [torch.full_like(boxes[:, :1], index) for index, boxes in enumerate(picked)]
    logits, deltas = classify(torch.cat([torch.cat(frames), torch.cat(picked)], dim=1))
    weights = torch.cat([_at(target["weights"], rows) for target, rows in zip(targets, matched)])
    label = torch.cat(labels)
    box_goals = torch.cat(encoded)
    background = torch.zeros_like(label)
    # A region of the background loses the same either way.
    is_label, is_background = (
        F.cross_entropy(logits, goal, reduction="none") for goal in (label, background)
    )
    class_loss = (weights * is_label + (1 - weights) * is_background).mean()
    rows = (label > 0).nonzero().squeeze(1)
    label_deltas = deltas.unflatten(1, (-1, 4))[rows, label[rows]]
    return class_loss + _box_loss(label_deltas, box_goals[rows], weights[rows]) / len(label)


def _match(matcher: Any, anchors: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Label of each anchor (A,): 1 an object, 0 background, -1 neither; and the row of the object it fits best."""
    if not len(target["boxes"]):
        return torch.zeros_like(anchors[:, 0]), torch.zeros(
            len(anchors), dtype=torch.int64, device=anchors.device
        )
    matched = matcher(box_iou(target["boxes"], anchors))
    labels = (matched >= 0).to(anchors.dtype)
    labels[matched == matcher.BETWEEN_THRESHOLDS] = -1
    return labels, matched.clamp(min=0)


def _at(values: Tensor, rows: Tensor) -> Tensor:
    """values (M, ...) at rows; zeros where there are none to take."""
    return values[rows] if len(values) else values.new_zeros(len(rows), *values.shape[1:])


def _box_loss(deltas: Tensor, goals: Tensor, weights: Tensor) -> Tensor:
    distance = F.smooth_l1_loss(deltas, goals, beta=BETA, reduction="none").sum(dim=-1)
    return (distance * weights).sum()


CANDIDATES_PER_PROPOSAL = 2
"""Classes per proposal, on average, that reach the last suppression."""
MIN_SIDE = 1e-2
"""Detections with a shorter side, in pixels of the input, are none (torchvision's)."""
CANONICAL_SIDE, CANONICAL_LEVEL = 224, 4
Detections = tuple[Tensor, Tensor, Tensor]


class Regions(NamedTuple):
    """What `forward` returns in train mode.

    Feature maps; objectness logits (N, A) and box deltas (N, A, 4); proposals (N, P, 4) in pixels of the input and
    their scores (N, P), NOTHING in the rows beyond what was found.
    """

    features: tuple[Tensor, ...]
    objectness: Tensor
    deltas: Tensor
    proposals: Tensor
    scores: Tensor


class TwoStage(Detector):
    """torchvision's Faster R-CNN without pre- and postprocessing.

    `forward`: x f32 (N, 3, H, W) -> in eval mode boxes (N, D, 4) in fractions, scores (N, D), best first, and labels
    (N, D) int64 from 0; rows beyond what was found are 0. In train mode `Regions`. On the meta device as many
    proposals go on as there may be. State dict keys are torchvision's: `backbone.*`, `rpn.*`, `roi_heads.*`.
    """

    nms_iou = None
    region_frames: Tensor | None = None
    """The frame of each region of the last run, for a joint pass (`edge_runtime.engines.joint_pass`)."""

    def __init__(self, whole: detection.FasterRCNN, input_size: InputSize) -> None:
        super().__init__()
        self.backbone: Any = whole.backbone
        self.rpn: Any = whole.rpn
        self.roi_heads: Any = whole.roi_heads
        self.extent = box_extent(input_size)
        generator: Any = self.rpn.anchor_generator
        shapes = map_shapes(self.backbone, input_size)
        grids = [shape[1:] for shape in shapes.values()]
        self.anchors = FixedBoxes(anchors_of(generator, input_size, grids))
        cells = zip(grids, generator.num_anchors_per_location(), strict=True)
        self.level_sizes = [height * width * anchors for (height, width), anchors in cells]
        pooled = self.roi_heads.box_roi_pool.featmap_names
        height, _ = height_width(input_size)
        self.strides = [
            nearest_power(height / shape[1]) for name, shape in shapes.items() if name in pooled
        ]

    def forward(self, x: Tensor) -> Regions | Detections:
        features = tuple(self.backbone(x).values())
        logits, deltas = concat_box_prediction_layers(*self.rpn.head(list(features)))
        objectness = logits.reshape(len(x), -1)
        deltas = deltas.reshape(len(x), -1, 4)
        with torch.no_grad():
            proposals, scores = self._propose(objectness.float(), deltas.float())
        if self.training:
            return Regions(features, objectness, deltas, proposals, scores)
        return self._detect(features, proposals, scores)

    def loss(self, outputs: Regions, targets: Sequence[BoxTarget]) -> Tensor:
        """The four losses of Faster R-CNN, summed; anchors and proposals are sampled by torch's own generator."""
        pixel_boxes = pixel_targets(targets, self.extent, outputs.objectness.device)
        return self._loss(
            outputs,
            [
                {**target, "weights": torch.ones_like(target["boxes"][:, 0])}
                for target in pixel_boxes
            ],
        )

    def distill(self, outputs: Regions, teacher: Detections) -> Tensor:
        """The same losses against the original's detections, weighted by their scores.

        A detection of score s teaches an anchor or proposal the object with weight s and the background with 1 - s; its
        box is weighted by s. So the loss is not zero at the original's own weights, but smallest near them.
        """
        boxes, scores, labels = teacher
        taught = []
        extent = self.extent.on(boxes.device)
        for box, score, label in zip(boxes.float() * extent, scores.float(), labels.long()):
            seen = score > 0
            taught.append({"boxes": box[seen], "labels": label[seen] + 1, "weights": score[seen]})
        return self._loss(outputs, taught)

    def _loss(self, outputs: Regions, targets: list[dict[str, Tensor]]) -> Tensor:
        anchors = self.anchors.on(outputs.objectness.device)
        first = proposal_loss(self.rpn, outputs.objectness, outputs.deltas, anchors, targets)
        proposals = [boxes[scores >= 0] for boxes, scores in zip(outputs.proposals, outputs.scores)]
        return first + region_loss(
            self.roi_heads, proposals, targets, lambda rois: self._regions(outputs.features, rois)
        )

    def _propose(self, objectness: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """The best proposals (N, P, 4) over all levels, each level suppressed alone, and their scores (N, P)."""
        boxes = []
        scores = []
        start = 0
        for size in self.level_sizes:
            level = slice(start, start + size)
            start += size
            logits, rows = objectness[:, level].topk(min(self.rpn.pre_nms_top_n(), size), dim=1)
            anchors = self.anchors.on(deltas.device)[level][rows]
            box = decode_boxes(rows_at(deltas[:, level], rows), anchors, self.rpn.box_coder.weights)
            box = box.clamp(min=0).minimum(self.extent.on(box.device))
            score = logits.sigmoid()
            sound = _large(box, self.rpn.min_size) & (score >= self.rpn.score_thresh)
            boxes.append(box)
            scores.append(suppress(box, torch.where(sound, score, NOTHING), self.rpn.nms_thresh))
        every = torch.cat(scores, dim=1)
        best, rows = every.topk(min(self.rpn.post_nms_top_n(), every.shape[1]), dim=1)
        return rows_at(torch.cat(boxes, dim=1), rows), best

    def _detect(
        self, features: Sequence[Tensor], proposals: Tensor, objectness: Tensor
    ) -> Detections:
        frames, proposals_each = objectness.shape
        heads = self.roi_heads
        live = rows_where((objectness >= 0).flatten())
        rois = torch.cat(
            [(live // proposals_each).to(proposals.dtype)[:, None], proposals.flatten(0, 1)[live]],
            dim=1,
        )
        logits, live_deltas = self._regions(features, rois)
        probabilities = logits.float().softmax(dim=1)[:, 1:]
        classes = probabilities.shape[1]
        scores = probabilities.new_full((frames * proposals_each, classes), NOTHING)
        scores[live] = probabilities
        deltas = probabilities.new_zeros((frames * proposals_each, classes * 4))
        deltas[live] = live_deltas[:, 4:].float()
        scores = scores.reshape(frames, -1)
        best, rows = scores.topk(
            min(CANDIDATES_PER_PROPOSAL * proposals_each, scores.shape[1]), dim=1
        )
        labels = rows % classes
        anchors = rows_at(proposals, rows // classes)
        boxes = decode_boxes(
            rows_at(deltas.reshape(frames, -1, 4), rows), anchors, heads.box_coder.weights
        )
        extent = self.extent.on(boxes.device)
        boxes = boxes.clamp(min=0).minimum(extent)
        best = torch.where(_large(boxes, MIN_SIDE) & (best > heads.score_thresh), best, NOTHING)
        # Offsets keep classes apart, so that one suppression serves all of them.
        shifted = boxes + (labels * (extent.max() + 1))[..., None]
        best, rows = suppress(shifted, best, heads.nms_thresh).topk(
            min(heads.detections_per_img, best.shape[1]), dim=1
        )
        missing = best < 0
        boxes = (rows_at(boxes, rows) / extent).masked_fill(missing[..., None], 0)
        labels = rows_at(labels, rows).masked_fill(missing, 0)
        padding = (0, heads.detections_per_img - best.shape[1])
        return (
            F.pad(boxes, (0, 0, *padding)),
            F.pad(best.clamp(min=0), padding),
            F.pad(labels, padding),
        )

    def _regions(self, features: Sequence[Tensor], rois: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits (R, C + 1) and box deltas (R, 4 (C + 1)) of rois (R, 5): frame, x0, y0, x1, y1 in pixels."""
        if torch.compiler.is_exporting():
            # The tracer must know to lay out the head; the graph takes none as well.
            torch._check(rois.shape[0] > 0)
        return self.roi_heads.box_predictor(
            self.roi_heads.box_head(self._pool(features, rois, self.roi_heads.box_roi_pool))
        )

    def _pool(self, features: Sequence[Tensor], rois: Tensor, pooling: Any) -> Tensor:
        """Regions (R, C, h, w), each from the level that fits its area (Lin et al. 2017, Feature Pyramids, eq. 1)."""
        if not self.training and not torch.compiler.is_exporting():
            self.region_frames = rois[:, 0]
        lowest, highest = (int(math.log2(stride)) for stride in (self.strides[0], self.strides[-1]))
        area = (rois[:, 3:] - rois[:, 1:3]).prod(dim=1)
        level = CANONICAL_LEVEL + torch.log2(area.sqrt() / CANONICAL_SIDE) + 1e-6
        level = level.floor().clamp(lowest, highest) - lowest
        pooled = features[0].new_zeros(rois.shape[0], features[0].shape[1], *pooling.output_size)
        # Where no value is known, all regions fall on one level: more than any real frame has alive at once.
        used = self.strides[:1] if rois.is_meta else self.strides
        for index, stride in enumerate(used):
            rows = rows_where(level == index)
            part = roi_align(
                features[index], rois[rows], pooling.output_size, 1 / stride, pooling.sampling_ratio
            )
            pooled[rows] = part.to(pooled.dtype)
        return pooled


def _large(boxes: Tensor, least: float) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0] >= least) & (boxes[..., 3] - boxes[..., 1] >= least)


SIZES = (32, 64, 128, 256, 512)
RATIOS = (0.5, 1.0, 2.0)
INPUT_SIZE = 800


class SingleMap(nn.Module):
    """A ResNet up to layer4: one map of 2048 channels at stride 32, or at 16 with its last stage dilated."""

    out_channels = 2048

    def __init__(self, name: str, dilated: bool) -> None:
        super().__init__()
        whole = torchvision.models.get_model(
            name, weights=None, replace_stride_with_dilation=[False, False, dilated]
        )
        self.body = IntermediateLayerGetter(whole, {"layer4": "0"})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.body(x)


def _build(
    make: Callable[..., detection.FasterRCNN],
    num_classes: int,
    input_size: InputSize,
    anchor_scale: float = 1.0,
    **args: Any,
) -> TwoStage:
    whole = make(num_classes, **args)
    whole.rpn.anchor_generator = scale_anchors(
        cast(AnchorGenerator, whole.rpn.anchor_generator), anchor_scale
    )
    return TwoStage(whole, input_size)


def _make_published(name: str, num_classes: int) -> detection.FasterRCNN:
    return getattr(detection, name)(weights=None, weights_backbone=None, num_classes=num_classes)


def _make_resnet101_fpn(num_classes: int) -> detection.FasterRCNN:
    backbone = resnet_fpn_backbone(
        backbone_name="resnet101", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    return detection.FasterRCNN(backbone, num_classes)


def _make_single_map(name: str, num_classes: int, dilated: bool = False) -> detection.FasterRCNN:
    return detection.FasterRCNN(
        SingleMap(name, dilated),
        num_classes,
        rpn_anchor_generator=AnchorGenerator((SIZES,), (RATIOS,)),
        box_roi_pool=MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2),
    )


for _name in (
    "resnet50_fpn",
    "resnet50_fpn_v2",
    "mobilenet_v3_large_fpn",
    "mobilenet_v3_large_320_fpn",
):
    _name = f"fasterrcnn_{_name}"
    _size = 320 if "320" in _name else INPUT_SIZE
    register(_name, task="detection", input_size=_size, published=_name)(
        partial(_build, partial(_make_published, _name))
    )
register("fasterrcnn_resnet101_fpn", task="detection", input_size=INPUT_SIZE)(
    partial(_build, _make_resnet101_fpn)
)
for _name in ("resnet50", "resnet101"):
    _factory = partial(_build, partial(_make_single_map, _name))
    register(f"fasterrcnn_{_name}_c5", task="detection", input_size=INPUT_SIZE)(_factory)
