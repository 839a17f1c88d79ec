"""YOLOv8 to YOLOv13 as Ultralytics exports them: one output (4 + C, A), boxes in pixels of the input, scores 0..1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs, count_extra
from gemel.models.decoders.families import YOLO
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.preprocess import Size

MIN_COLUMNS = 1000
"""So many are anchors, of whatever grids."""
STRIDES = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64), (16, 32))
ROTATION = frozenset({"Cos", "Sin"})
"""What places rotated boxes."""
WORDS = ("yolov8", "yolo9", "yolo11", "yolo12", "yolo1")
CORNER_FAMILIES = ("yolo9", "rtmdet", "picodet", "ssd")
"""Families of LibreYOLO that export corners where Ultralytics exports centre and sides."""


@dataclass(frozen=True)
class Yolo(Decoder):
    """YOLOv8 to YOLOv13 as Ultralytics exports them: one output (4 + C, A).

    `index` is that of the output; with `rows` its axes are (A, 4 + C); columns after the classes are left out.
    """

    name = "yolo"
    preparation = YOLO
    words = WORDS
    nms_iou = 0.7
    width: int
    index: int = 0
    rows: bool = False
    has_corners: bool = False

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """An output with a column for each anchor, or a row for each cell; coefficients or points may follow."""
        extra = count_extra(head)
        decoders = []
        for index, output in enumerate(head.outputs):
            # Odds of letters, one after the other.
            is_text = "Softmax" in output.tail and "Sigmoid" not in output.tail
            if len(output.shape) == 2 and not is_text and not output.tail >= ROTATION:
                rows = output.shape[0] > output.shape[1]
                channels, count = sorted(output.shape)
                width = channels - 4 - extra
                is_anchor = not rows and count >= MIN_COLUMNS
                if width > 0 and (is_anchor or head.strides(count, *STRIDES)):
                    decoders.append(
                        cls(width, index, rows, head.family.startswith(CORNER_FAMILIES))
                    )
        return decoders[:1]

    def bounds(self, outputs: Outputs) -> Array:
        """The best score of each row."""
        values = outputs[self.index]
        classes = slice(4, 4 + self.width)
        return values[..., classes].max(-1) if self.rows else values[:, classes].max(1)

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Centre and sides as corners; the scores are those of the file."""
        values = as_float(outputs[self.index])
        values = values[:, rows] if self.rows else values[..., rows].swapaxes(1, 2)
        boxes = values[..., :4] if self.has_corners else corners(values[..., :4])
        return fractions(boxes, size), values[..., 4 : 4 + self.width]
