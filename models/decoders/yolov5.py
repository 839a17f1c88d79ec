"""YOLOv5 and YOLOv7, decoded in the graph: (A, 5 + C) with three anchors a cell; the score is objectness x class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs
from gemel.models.decoders.families import YOLO
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.preprocess import Size

ANCHORS = 3
STRIDES = ((8, 16, 32), (8, 16, 32, 64), (16, 32))


@dataclass(frozen=True)
class YoloV5(Decoder):
    """YOLOv5 and YOLOv7, decoded in the graph: (A, 5 + C).

    `index` is that of the output; the maps of single levels that may stand beside it are left out.
    """

    name = "yolov5"
    preparation = YOLO
    has_objectness = True
    width: int
    index: int = 0

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """An output with a row for each anchor of the grids."""
        for index, output in enumerate(head.outputs):
            has_columns = len(output.shape) == 2 and output.shape[1] > 5
            if has_columns and head.strides(output.shape[0], *STRIDES, anchors=ANCHORS):
                return [cls(output.shape[1] - 5, index)]
        return []

    def bounds(self, outputs: Outputs) -> Array:
        """The objectness."""
        return outputs[self.index][..., 4]

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Boxes are in pixels of the input."""
        values = as_float(outputs[self.index][:, rows])
        return fractions(corners(values[..., :4]), size), values[..., 4:5] * values[..., 5:]
