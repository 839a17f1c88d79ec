"""Detections that the graph has chosen itself (YOLOv10, YOLO26): rows of corners in pixels, score and class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from models.decoders.boxes import fractions
from models.decoders.families import YOLO, family_preprocess
from models.decoders.registry import Boxes, Decoder, GraphHead, class_names, register
from models.preprocess import Preprocess, Size

COLUMNS = 6
USUAL_WIDTH = 80
MAX_ROWS = 1000
"""More are the cells of a grid."""


@register
@dataclass(frozen=True)
class EndToEnd(Decoder):
    """The file's own names tell how many classes there are: COCO's 80 where it has none."""

    name = "yolo-end2end"
    nms_iou = None
    width: int
    index: int = 0

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """An output of six columns."""
        width = len(class_names(head.metadata) or ()) or USUAL_WIDTH
        return [
            cls(width, index)
            for index, output in enumerate(head.outputs)
            if output.shape[1:] == (COLUMNS,) and output.shape[0] <= MAX_ROWS
        ][:1]

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """Letterbox in the middle, values 0..1."""
        return family_preprocess(metadata, size, YOLO)

    def decode(self, outputs: Sequence[Tensor], size: Size) -> Boxes:
        """A detection's score under its class, 0 under the others."""
        rows = outputs[self.index].float()
        label = rows[..., 5].round().long().clamp(0, self.width - 1)
        return fractions(rows[..., :4], size), F.one_hot(label, self.width) * rows[..., 4:5]
