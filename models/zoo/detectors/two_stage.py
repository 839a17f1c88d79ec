"""Faster R-CNN (Ren et al. 2015) as a graph of tensors: proposals, pooled regions, detections, suppression inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torchvision.models.detection as detection
from torch import Tensor
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import roi_align

from models.detector import BoxTarget, Candidates, Detector
from models.zoo.detectors.boxes import FixedBoxes, anchors_of, decode_boxes, nearest_power
from models.zoo.detectors.losses.focal import pixel_targets
from models.zoo.detectors.losses.two_stage import proposal_loss, region_loss
from models.zoo.detectors.single_stage import map_shapes
from models.zoo.detectors.suppression import NOTHING, rows_at, rows_where, suppress

CANDIDATES_PER_PROPOSAL = 2
"""How many classes of a proposal, on average, may come to the last suppression."""
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

    `forward`: x f32 (N, 3, S, S) -> in eval mode boxes (N, D, 4) in fractions, scores (N, D), best first, and labels
    (N, D) int64 from 0; rows beyond what was found are 0. In train mode `Regions`. On the meta device as many
    proposals go on as there may be. State dict keys are torchvision's: `backbone.*`, `rpn.*`, `roi_heads.*`.
    """

    nms_iou = None

    def __init__(self, whole: detection.FasterRCNN, input_size: int) -> None:
        super().__init__()
        self.backbone: Any = whole.backbone
        self.rpn: Any = whole.rpn
        self.roi_heads: Any = whole.roi_heads
        self.input_size = input_size
        generator: Any = self.rpn.anchor_generator
        shapes = map_shapes(self.backbone, input_size)
        grids = [shape[1:] for shape in shapes.values()]
        self.anchors = FixedBoxes(anchors_of(generator, input_size, grids))
        cells = zip(grids, generator.num_anchors_per_location(), strict=True)
        self.level_sizes = [height * width * anchors for (height, width), anchors in cells]
        pooled = self.roi_heads.box_roi_pool.featmap_names
        self.strides = [nearest_power(input_size / shape[1]) for name, shape in shapes.items() if name in pooled]

    def forward(self, x: Tensor) -> Regions | Detections:
        features = tuple(self.backbone(x).values())
        logits, deltas = concat_box_prediction_layers(*self.rpn.head(list(features)))
        objectness, deltas = logits.reshape(len(x), -1), deltas.reshape(len(x), -1, 4)
        with torch.no_grad():
            proposals, scores = self._propose(objectness.float(), deltas.float())
        if self.training:
            return Regions(features, objectness, deltas, proposals, scores)
        return self._detect(features, proposals, scores)

    def candidates(self, outputs: Detections, min_score: float) -> list[Candidates]:
        boxes, scores, labels = outputs
        kept = (scores >= min_score) & (scores > 0)
        return [Candidates(b[k], s[k], c[k]) for b, s, c, k in zip(boxes, scores, labels, kept)]

    def loss(self, outputs: Regions, targets: Sequence[BoxTarget]) -> Tensor:
        """The four losses of Faster R-CNN, summed; anchors and proposals are sampled by torch's own generator."""
        wanted = pixel_targets(targets, self.input_size, outputs.objectness.device)
        return self._loss(outputs, [{**one, "weights": torch.ones_like(one["boxes"][:, 0])} for one in wanted])

    def distill(self, outputs: Regions, teacher: Detections) -> Tensor:
        """The same losses against the original's detections, each one an object to the degree of its score.

        Where it says s, an anchor or proposal is taught to be the object with weight s and background with 1 - s; its
        box counts s. So the loss is not zero at the original's own weights, but least near them.
        """
        boxes, scores, labels = teacher
        wanted = []
        for box, score, label in zip(boxes.float() * self.input_size, scores.float(), labels.long()):
            seen = score > 0
            wanted.append({"boxes": box[seen], "labels": label[seen] + 1, "weights": score[seen]})
        return self._loss(outputs, wanted)

    def exported(self, x: Tensor) -> Detections:
        """Boxes, scores and labels as in eval mode: suppression is inside."""
        return self(x)

    def _loss(self, outputs: Regions, targets: list[dict[str, Tensor]]) -> Tensor:
        anchors = self.anchors.on(outputs.objectness.device)
        first = proposal_loss(self.rpn, outputs.objectness, outputs.deltas, anchors, targets)
        found = [boxes[scores >= 0] for boxes, scores in zip(outputs.proposals, outputs.scores)]
        return first + region_loss(self.roi_heads, found, targets, lambda rois: self._regions(outputs.features, rois))

    def _propose(self, objectness: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """The best proposals (N, P, 4) over all levels, each level suppressed alone, and their scores (N, P)."""
        boxes, scores, start = [], [], 0
        for size in self.level_sizes:
            level = slice(start, start + size)
            start += size
            logits, rows = objectness[:, level].topk(min(self.rpn.pre_nms_top_n(), size), dim=1)
            anchors = self.anchors.on(deltas.device)[level][rows]
            box = decode_boxes(rows_at(deltas[:, level], rows), anchors, self.rpn.box_coder.weights)
            box = box.clamp(0, self.input_size)
            score = logits.sigmoid()
            sound = _large(box, self.rpn.min_size) & (score >= self.rpn.score_thresh)
            boxes.append(box)
            scores.append(suppress(box, torch.where(sound, score, NOTHING), self.rpn.nms_thresh))
        every = torch.cat(scores, dim=1)
        best, rows = every.topk(min(self.rpn.post_nms_top_n(), every.shape[1]), dim=1)
        return rows_at(torch.cat(boxes, dim=1), rows), best

    def _detect(self, features: Sequence[Tensor], proposals: Tensor, found: Tensor) -> Detections:
        frames, most = found.shape
        heads = self.roi_heads
        live = rows_where((found >= 0).flatten())
        rois = torch.cat([(live // most).to(proposals.dtype)[:, None], proposals.flatten(0, 1)[live]], dim=1)
        logits, live_deltas = self._regions(features, rois)
        probabilities = logits.float().softmax(dim=1)[:, 1:]
        classes = probabilities.shape[1]
        scores = probabilities.new_full((frames * most, classes), NOTHING)
        scores[live] = probabilities
        deltas = probabilities.new_zeros((frames * most, classes * 4))
        deltas[live] = live_deltas[:, 4:].float()
        scores = scores.reshape(frames, -1)
        best, rows = scores.topk(min(CANDIDATES_PER_PROPOSAL * most, scores.shape[1]), dim=1)
        labels = rows % classes
        anchors = rows_at(proposals, rows // classes)
        boxes = decode_boxes(rows_at(deltas.reshape(frames, -1, 4), rows), anchors, heads.box_coder.weights)
        boxes = boxes.clamp(0, self.input_size)
        best = torch.where(_large(boxes, MIN_SIDE) & (best > heads.score_thresh), best, NOTHING)
        # Classes lie apart from each other, so that one suppression serves them all.
        apart = boxes + (labels * (self.input_size + 1))[..., None]
        best, rows = suppress(apart, best, heads.nms_thresh).topk(min(heads.detections_per_img, best.shape[1]), dim=1)
        missing = best < 0
        boxes = (rows_at(boxes, rows) / self.input_size).masked_fill(missing[..., None], 0)
        labels = rows_at(labels, rows).masked_fill(missing, 0)
        rest = (0, heads.detections_per_img - best.shape[1])
        return F.pad(boxes, (0, 0, *rest)), F.pad(best.clamp(min=0), rest), F.pad(labels, rest)

    def _regions(self, features: Sequence[Tensor], rois: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits (R, C + 1) and box deltas (R, 4 (C + 1)) of rois (R, 5): frame, x0, y0, x1, y1 in pixels."""
        if torch.compiler.is_exporting():
            torch._check(rois.shape[0] > 0)  # the tracer must know to lay out the head; the graph takes none as well
        return self.roi_heads.box_predictor(self.roi_heads.box_head(self._pool(features, rois)))

    def _pool(self, features: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Regions (R, C, 7, 7), each from the level that fits its area (Lin et al. 2017, Feature Pyramids, eq. 1)."""
        pooling = self.roi_heads.box_roi_pool
        lowest, highest = (int(math.log2(stride)) for stride in (self.strides[0], self.strides[-1]))
        area = (rois[:, 3:] - rois[:, 1:3]).prod(dim=1)
        level = CANONICAL_LEVEL + torch.log2(area.sqrt() / CANONICAL_SIDE) + 1e-6
        level = level.floor().clamp(lowest, highest) - lowest
        pooled = features[0].new_zeros(rois.shape[0], features[0].shape[1], *pooling.output_size)
        # Where no value is known, all regions fall on one level: more than any real frame has alive at once.
        used = self.strides[:1] if rois.is_meta else self.strides
        for index, stride in enumerate(used):
            rows = rows_where(level == index)
            part = roi_align(features[index], rois[rows], pooling.output_size, 1 / stride, pooling.sampling_ratio)
            pooled[rows] = part.to(pooled.dtype)
        return pooled


def _large(boxes: Tensor, least: float) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0] >= least) & (boxes[..., 3] - boxes[..., 1] >= least)
