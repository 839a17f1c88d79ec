"""DETR and its descendants (RT-DETR, D-FINE, RF-DETR): a box and class scores for each query, without suppression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.models.arrays import as_float, sigmoid, softmax
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Output, Outputs, class_names
from gemel.models.decoders.families import IMAGENET, PLAIN
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.preprocess import Size

COCO_SOFTMAX = 92
"""Scores of a DETR for COCO: 91 numbers of categories, and no object."""
MAX_QUERIES = 1000
STRIDES = (8, 16, 32)
"""As many rows as these grids have cells are no queries."""
SUPPRESSION = "iou_threshold"
"""What a suppression is set by."""
RF_DETR_OUTPUT = "dets"
BOXES = ("box", RF_DETR_OUTPUT)


@dataclass(frozen=True)
class Detr(Decoder):
    """DETR and its descendants (RT-DETR, D-FINE, RF-DETR): a box and class scores for each query.

    `boxes` and `scores` are indices of outputs, equal where one output (Q, 4 + C) has both.

    Boxes are centre and sides in fractions of the input, or corners, or corners in pixels of it.
    `activation` is what the graph leaves to its reader: "sigmoid"; "softmax", whose last column is no object; or none.
    """

    name = "detr"
    words = ("detr", "dfine", "deim")
    nms_iou = None
    width: int
    boxes: int = 0
    scores: int = 1
    activation: str = "sigmoid"
    has_mean: bool = False
    has_corners: bool = False
    in_pixels: bool = False

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Two outputs (Q, 4) and (Q, C) in any order, or RT-DETR's (Q, 4 + C) of Ultralytics; none was suppressed."""
        # Queries are not suppressed, nor in levels.
        if head.has_levels or (head.cut is not None and SUPPRESSION in head.cut.attributes):
            return []
        flat = [
            (index, output) for index, output in enumerate(head.outputs) if len(output.shape) == 2
        ]
        if len(flat) == 1:
            index, output = flat[0]
            queries, columns = output.shape
            if columns > 4 and queries <= MAX_QUERIES and "detr" in head.family.replace("-", ""):
                return [cls(columns - 4, index, index, "")]
            return []
        for boxes, candidate in flat:
            for scores, other in flat:
                same = candidate.shape[0] == other.shape[0] <= MAX_QUERIES and not head.strides(
                    candidate.shape[0], STRIDES
                )
                if (
                    boxes != scores
                    and same
                    and candidate.shape[1] == 4
                    and _are_boxes(candidate, other)
                ):
                    return _of_two(cls, head, boxes, scores)
        return []

    def takes(self, count: int) -> bool:
        """As many as its classes; RF-DETR has a column more."""
        return count in (self.width, self.width - (self.has_mean and self.activation == "sigmoid"))

    @property
    def preparation(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Stretched; scaled by ImageNet's mean in DETR and RF-DETR, not in RT-DETR and D-FINE."""
        return IMAGENET if self.has_mean else PLAIN

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Boxes as corners in fractions of the input."""
        boxes, scores = (as_float(outputs[place])[:, rows] for place in (self.boxes, self.scores))
        boxes = boxes[..., :4]
        if self.boxes == self.scores:
            scores = scores[..., 4:]
        if self.activation == "sigmoid":
            scores = sigmoid(scores)
        elif self.activation == "softmax":
            scores = softmax(scores)
        boxes = boxes if self.has_corners else corners(boxes)
        return fractions(boxes, size) if self.in_pixels else boxes, scores[..., : self.width]


def _are_boxes(candidate: Output, other: Output) -> bool:
    """Four classes have as many columns as boxes; then the names tell, or the Sigmoid that boxes have."""
    has_box_name = any(part in candidate.name.lower() for part in BOXES)
    return (
        other.shape[1] != 4
        or has_box_name
        or candidate.has_corners
        or "Sigmoid" in candidate.tail - other.tail
    )


def _of_two(cls: type[Detr], head: GraphHead, boxes: int, scores: int) -> Sequence[Detr]:
    """The ways to read the scores; where nothing in the file tells, the number of classes does."""
    columns = head.outputs[scores].shape[1]
    box = head.outputs[boxes]
    is_rf_detr = box.name == RF_DETR_OUTPUT
    form = {"has_corners": box.has_corners, "in_pixels": box.has_corners and box.is_scaled}
    names = class_names(head.metadata)
    # The graph itself has made the scores.
    if "Sigmoid" in head.outputs[scores].tail:
        return [cls(columns, boxes, scores, "", is_rf_detr, **form)]
    independent = cls(columns, boxes, scores, "sigmoid", is_rf_detr, **form)
    if is_rf_detr:
        return [independent]
    with_no_object = cls(columns - 1, boxes, scores, "softmax", True, **form)
    # One column more than classes is that of no object.
    if columns == COCO_SOFTMAX or (names is not None and columns == len(names) + 1):
        return [with_no_object]
    return [independent, with_no_object]
