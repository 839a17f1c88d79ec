"""FastestDet (X. Ma 2022), as its authors export it: one map (1 + 4 + C, H / 16, W / 16), activated but for the box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemel.models.arrays import as_float, constant, library_of, sigmoid
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs
from gemel.models.decoders.families import FASTESTDET
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, grid
from gemel.models.preprocess import Size

STRIDE = 16
OBJECTNESS_POWER, CLASS_POWER = 0.6, 0.4


@dataclass(frozen=True)
class FastestDetMap(Decoder):
    """FastestDet, as its authors export it: one map.

    Objectness, box and classes of each cell.
    """

    name = "fastestdet"
    preparation = FASTESTDET
    has_objectness = True
    width: int

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One map of stride 16."""
        output = head.outputs[0]
        if len(head.outputs) > 1 or len(output.shape) != 3 or output.shape[0] < 6:
            return []
        fits = output.shape[1:] == (head.size[0] // STRIDE, head.size[1] // STRIDE)
        return [cls(output.shape[0] - 5)] if fits else []

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """handle_preds of the authors' utils/tool.py."""
        cells = as_float(outputs[0])
        cells = cells.reshape(*cells.shape[:2], -1)[..., rows].swapaxes(1, 2)
        library = library_of(cells)
        places, steps = (values[rows] for values in grid(size, (STRIDE,), cells))
        centre = (
            (library.tanh(cells[..., 1:3]) + places) * steps / constant([size[1], size[0]], cells)
        )
        scores = cells[..., :1] ** OBJECTNESS_POWER * cells[..., 5:] ** CLASS_POWER
        return corners(library.concatenate([centre, sigmoid(cells[..., 3:5])], -1)), scores
