"""Detections that the graph has chosen itself (YOLOv10, YOLO26): rows of corners in pixels, score and class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemel.models.arrays import as_float, constant
from gemel.models.decoders.decoder import (
    OVERLAP,
    Boxes,
    Decoder,
    GraphHead,
    Outputs,
    class_names,
    count_extra,
)
from gemel.models.decoders.families import YOLO
from gemel.models.decoders.grids import ALL_ROWS, Rows, fractions
from gemel.models.decoders.yolo import ROTATION
from gemel.models.preprocess import Size

COLUMNS = 6
USUAL_WIDTH = 80
MANY = 1000
"""More rows are candidates before suppression, as DeepStream's exporters write them."""
END2END_WORDS = ("yolov10", "yolo26")
CHOICES = frozenset({"ArgMax", "Cast", "ReduceMax", "TopK"})
"""What makes the class of such a candidate; without them six columns are the scores of one or two classes."""
STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class EndToEnd(Decoder):
    """Detections that the graph has chosen itself (YOLOv10, YOLO26): rows of corners, score and class.

    One output of rows where `boxes` and `scores` are equal, else the two from which a top-k chose the rows.

    The file's own names tell how many classes rows have: COCO's 80 where it has none.
    """

    name = "yolo-end2end"
    preparation = YOLO
    words = END2END_WORDS
    width: int
    boxes: int = 0
    scores: int = 0
    nms_iou: float | None = None

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """An output of six columns, coefficients or points after them, or what entered the top-k: (A, 4) and (A, C)."""
        shapes = [output.shape for output in head.outputs]
        # Rotated boxes have a decoder of their own.
        if any(output.tail >= ROTATION for output in head.outputs):
            return []
        width = len(class_names(head.metadata) or ()) or USUAL_WIDTH
        for index, shape in enumerate(shapes):
            chosen = len(shape) == 2 and (shape[0] <= MANY or head.outputs[index].tail & CHOICES)
            if chosen and shape[1] == COLUMNS + count_extra(head) and (shape[0], 4) not in shapes:
                return [cls(width, index, index, OVERLAP if shape[0] > MANY else None)]
        # Without a top-k no rows were chosen.
        if head.cut is None or head.cut.operator != "TopK":
            return []
        count = head.cells(STRIDES)
        boxes = [index for index, shape in enumerate(shapes) if shape == (count, 4)]
        scores = [
            index
            for index, shape in enumerate(shapes)
            if shape[:1] == (count,) and index not in boxes[-1:]
        ]
        return [cls(shapes[scores[0]][1], boxes[-1], scores[0])] if boxes and scores else []

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Of a row, its score under its class and 0 under the others."""
        values, scores = (as_float(outputs[place])[:, rows] for place in (self.boxes, self.scores))
        if self.boxes == self.scores:
            labels = values[..., 5:6].round().clip(0, self.width - 1)
            scores = values[..., 4:5] * (labels == constant(range(self.width), values))
        return fractions(values[..., :4], size), scores
