"""YOLOX (Ge et al. 2021) and YOLOv6: (A, 5 + C), with the grid in the graph or outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.models.arrays import Array, as_float, library_of
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs
from gemel.models.decoders.families import YOLO, YOLOX
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions, grid
from gemel.models.preprocess import Size

STRIDES = ((8, 16, 32), (8, 16, 32, 64))
ARITHMETIC = frozenset({"Add", "Mul", "Exp", "Pow", "Sub", "Div"})


@dataclass(frozen=True)
class Yolox(Decoder):
    """YOLOX and YOLOv6: (A, 5 + C), with the grid in the graph or outside it.

    `strides` is empty where the graph decodes; `is_yolox` is False for YOLOv6, which decodes without `Exp`.
    """

    name = "yolox"
    has_objectness = True
    width: int
    strides: tuple[int, ...] = ()
    is_yolox: bool = True

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One output with a row for each cell; it is raw where nothing is computed after the last layers."""
        output = head.outputs[0]
        if len(head.outputs) > 1 or len(output.shape) != 2 or output.shape[1] < 6:
            return []
        strides = head.strides(output.shape[0], *STRIDES)
        if not strides:
            return []
        decoded = bool(output.tail & ARITHMETIC)
        is_yolox = not decoded or bool(output.tail & {"Exp", "Pow"})
        return [cls(output.shape[1] - 5, () if decoded else strides, is_yolox)]

    @property
    def preparation(self) -> Mapping[str, Any]:  # type: ignore[override]
        """YOLOX: letterbox at the top left, blue first, values 0..255."""
        return YOLOX if self.is_yolox else YOLO

    def bounds(self, outputs: Outputs) -> Array:
        """The objectness."""
        return outputs[0][..., 4]

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Raw: centre = (x + cell) x stride, sides = exp(w) x stride (section 2.1, and yolo_head.py)."""
        values = as_float(outputs[0][:, rows])
        boxes = values[..., :4]
        if self.strides:
            places, steps = (cells[rows] for cells in grid(size, self.strides, values))
            library = library_of(values)
            sides = library.exp(values[..., 2:4]) * steps
            boxes = library.concatenate([(values[..., :2] + places) * steps, sides], -1)
        return fractions(corners(boxes), size), values[..., 4:5] * values[..., 5:]
