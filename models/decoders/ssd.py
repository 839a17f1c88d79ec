"""Boxes and scores in two outputs, decoded, before suppression: SSD and its like, YOLO-NAS, DAMO-YOLO, PP-YOLOE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from models.decoders.boxes import fractions
from models.decoders.families import YOLO, family_preprocess
from models.decoders.registry import Boxes, Decoder, GraphHead, Output, register
from models.preprocess import Preprocess, Size

MIN_ROWS = 1000
"""Fewer are the queries of a DETR."""
STRIDES = ((8, 16, 32), (8, 16, 32, 64))
TENSORFLOW = "detection_boxes"
TENSORFLOW_ROWS = (1, 0, 3, 2)


@register
@dataclass(frozen=True)
class Ssd(Decoder):
    """`boxes` and `scores` are indices of outputs; `background` columns before the classes are left out.

    Boxes of a network with a grid are in pixels of the input, others in fractions of it; TensorFlow's begin with y.
    """

    name = "ssd"
    width: int
    boxes: int = 0
    scores: int = 1
    background: int = 0
    in_pixels: bool = False
    y_first: bool = False
    nms_iou: float | None = 0.45

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Outputs (A, 4) and (A, C) in any order, the scores 0..1; a softmax has a background first."""
        flat = [(index, output) for index, output in enumerate(head.outputs) if len(output.shape) == 2]
        for boxes, one in flat:
            for scores, other in flat:
                rows = other.shape[0]
                if boxes != scores and rows > MIN_ROWS and one.shape == (rows, 4) and _are_scores(other):
                    background = int("Softmax" in other.tail)
                    in_pixels = bool(head.strides(rows, *STRIDES)) and "gemel.preprocess" not in head.metadata
                    y_first = TENSORFLOW in one.name
                    nms_iou = None if head.cut == "TopK" else cls.nms_iou
                    return [cls(other.shape[1] - background, boxes, scores, background, in_pixels, y_first, nms_iou)]
        return []

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """These networks have none in common; one of Ultralytics' is a YOLOv10 whose choice was cut off."""
        return family_preprocess(metadata, size, YOLO if "Ultralytics" in metadata.get("author", "") else None)

    def decode(self, outputs: Sequence[Tensor], size: Size) -> Boxes:
        """Boxes as x0 y0 x1 y1 in fractions."""
        boxes, scores = outputs[self.boxes].float(), outputs[self.scores].float()[..., self.background :]
        if self.y_first:
            boxes = boxes[..., TENSORFLOW_ROWS]
        return fractions(boxes, size) if self.in_pixels else boxes, scores


def _are_scores(output: Output) -> bool:
    return bool(output.tail & {"Softmax", "Sigmoid"}) or "score" in output.name.lower()
