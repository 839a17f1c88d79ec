"""FastestDet (X. Ma 2022), as its authors export it: one map (1 + 4 + C, H / 16, W / 16), activated but for the box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.decoders.families import OPENCV, PLAIN, family_preprocess
from models.decoders.grids import corners, grid
from models.decoders.registry import Boxes, Decoder, GraphHead, register
from models.preprocess import Preprocess, Size

STRIDE = 16
OBJECTNESS_POWER, CLASS_POWER = 0.6, 0.4


@register
@dataclass(frozen=True)
class FastestDetMap(Decoder):
    """Objectness, box and classes of each cell."""

    name = "fastestdet"
    width: int

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One map of stride 16."""
        output = head.outputs[0]
        if len(head.outputs) > 1 or len(output.shape) != 3 or output.shape[0] < 6:
            return []
        fits = output.shape[1:] == (head.size[0] // STRIDE, head.size[1] // STRIDE)
        return [cls(output.shape[0] - 5)] if fits else []

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """Stretched, blue first, values 0..1."""
        return family_preprocess(metadata, size, {**PLAIN, **OPENCV, "channels": "bgr"})

    def decode(self, outputs: Sequence[Tensor], size: Size) -> Boxes:
        """handle_preds of the authors' utils/tool.py."""
        rows = outputs[0].float().flatten(2).transpose(1, 2)
        places, steps = grid(size, (STRIDE,), rows.device)
        sides = rows.new_tensor([size[1], size[0]])
        centre = (rows[..., 1:3].tanh() + places) * steps / sides
        scores = rows[..., :1] ** OBJECTNESS_POWER * rows[..., 5:] ** CLASS_POWER
        return corners(torch.cat([centre, rows[..., 3:5].sigmoid()], dim=-1)), scores
