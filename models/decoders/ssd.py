"""Boxes and scores in two outputs, decoded, before suppression: SSD and its like, YOLO-NAS, DAMO-YOLO, PP-YOLOE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float
from gemel.models.decoders.decoder import OVERLAP, Boxes, Decoder, GraphHead, Output, Outputs
from gemel.models.decoders.families import ULTRALYTICS, YOLO, YOLO_NAS, family_preprocess
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.preprocess import Preprocess, Size

MIN_ROWS = 1000
"""Fewer are the queries of a DETR, unless suppression follows."""
STRIDES = ((8, 16, 32), (8, 16, 32, 64))
ANCHORS = 3
FLAT, PAIR = "flat_predictions", ("pred_boxes", "pred_scores")
"""Outputs of super-gradients; those behind a suppression begin with the name of a graph, as graph2_pred_boxes."""
COCO_SIZE = (640, 640)
TENSORFLOW = "detection_boxes"
TENSORFLOW_ROWS = (1, 0, 3, 2)


@dataclass(frozen=True)
class Ssd(Decoder):
    """Boxes and scores in two outputs, before suppression: SSD, YOLO-NAS, DAMO-YOLO, PP-YOLOE.

    `boxes` and `scores` are indices of outputs; `background` columns before the classes are left out.

    Boxes of a network with a grid are in pixels of the input, others in fractions of it; TensorFlow's begin with y.
    `columns`: the scores are (C, A), as suppression takes them. `centred`: boxes are centre and sides.
    """

    name = "ssd"
    width: int
    boxes: int = 0
    scores: int = 1
    background: int = 0
    in_pixels: bool = False
    y_first: bool = False
    columns: bool = False
    centred: bool = False
    nms_iou: float | None = OVERLAP
    is_yolo_nas: bool = False

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """Outputs (A, 4) and (A, C) in any order, the scores 0..1; a softmax has a background first."""
        flat = [
            (index, output) for index, output in enumerate(head.outputs) if len(output.shape) == 2
        ]
        options = head.cut.attributes if head.cut else {}
        overlap = options.get("iou_threshold", OVERLAP)
        chosen = head.cut is not None and head.cut.operator == "TopK"
        # Several levels are another family's; Ultralytics' own top-k is EndToEnd's.
        if head.has_levels or (chosen and head.metadata.get("author") == ULTRALYTICS):
            return []
        least = MIN_ROWS if chosen or head.cut is None else 0
        for boxes, candidate in flat:
            for scores, other in flat:
                rows = candidate.shape[0]
                columns = other.shape[0] < other.shape[1]
                count, channels = other.shape[::-1] if columns else other.shape
                if (
                    boxes == scores
                    or rows <= least
                    or candidate.shape != (count, 4)
                    or not _are_scores(other)
                ):
                    continue
                background = int("Softmax" in other.tail)
                is_grid = any(
                    head.strides(rows, *STRIDES, anchors=anchors) for anchors in (1, ANCHORS)
                )
                return [
                    cls(
                        channels - background,
                        boxes,
                        scores,
                        background,
                        in_pixels=is_grid and "gemel.preprocess" not in head.metadata,
                        y_first=TENSORFLOW in candidate.name,
                        columns=columns,
                        centred=bool(options.get("box_coding") or options.get("center_point_box")),
                        nms_iou=None if chosen else overlap,
                        is_yolo_nas=_is_yolo_nas(head),
                    )
                ]
        return []

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """YOLO-NAS as YOLOv8, at COCO's size with a margin; these networks have none in common."""
        default = YOLO_NAS if size == COCO_SIZE else YOLO
        return family_preprocess(metadata, size, default if self.is_yolo_nas else None)

    def bounds(self, outputs: Outputs) -> Array:
        """The best score of each row."""
        scores = outputs[self.scores]
        return (
            scores[:, self.background :].max(1)
            if self.columns
            else scores[..., self.background :].max(-1)
        )

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Boxes as x0 y0 x1 y1 in fractions."""
        boxes = as_float(outputs[self.boxes])[:, rows]
        scores = as_float(outputs[self.scores])
        scores = scores[..., rows].swapaxes(1, 2) if self.columns else scores[:, rows]
        scores = scores[..., self.background :]
        if self.centred:
            boxes = corners(boxes)
        if self.y_first:
            boxes = boxes[..., list(TENSORFLOW_ROWS)]
        return fractions(boxes, size) if self.in_pixels else boxes, scores


def _is_yolo_nas(head: GraphHead) -> bool:
    """Whether the names of the file's outputs are those of super-gradients, before or behind its suppression."""
    names = {output.name for output in head.outputs} | set(head.cut.outputs if head.cut else ())
    return any(
        all(any(name.endswith(end) for name in names) for end in ends) for ends in ((FLAT,), PAIR)
    )


def _are_scores(output: Output) -> bool:
    return bool(output.tail & {"Softmax", "Sigmoid"}) or "score" in output.name.lower()
