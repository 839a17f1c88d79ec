"""What Ultralytics' heads find beside boxes and scores: points, coefficients of masks, or angles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float, library_of
from gemel.models.decoders.decoder import Boxes, Decoder, GraphHead, Outputs
from gemel.models.decoders.end2end import END2END_WORDS
from gemel.models.decoders.families import YOLO
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.decoders.yolo import ROTATION, STRIDES, WORDS
from gemel.models.objects.outlines import rotate_boxes
from gemel.models.preprocess import Size


@dataclass(frozen=True)
class YoloParts(Decoder):
    """`boxes`, `scores` and `extras` are indices of outputs, equal where one output (4 + C + E, A) has them all.

    The boxes of several are corners, as a top-k or a suppression that was cut off read them; those of one are centre
    and sides.
    """

    preparation = YOLO
    width: int
    boxes: int = 0
    scores: int = 0
    extras: int = 0
    nms_iou: float | None = 0.7

    def bounds(self, outputs: Outputs) -> Array:
        """The best score of each row."""
        if self.boxes == self.scores:
            return outputs[self.boxes][:, 4 : 4 + self.width].max(1)
        return outputs[self.scores].max(-1)

    def split(self, outputs: Outputs, rows: Rows = ALL_ROWS) -> tuple[Array, Array, Array]:
        """Boxes (N, A, 4) as they are, scores (N, A, C) and what follows (N, A, E)."""
        if self.boxes == self.scores:
            values = as_float(outputs[self.boxes])[..., rows].swapaxes(1, 2)
            return values[..., :4], values[..., 4 : 4 + self.width], values[..., 4 + self.width :]
        boxes, scores, extras = (
            as_float(outputs[place])[:, rows] for place in (self.boxes, self.scores, self.extras)
        )
        return boxes, scores, extras

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """Boxes in fractions of the input, and their scores."""
        boxes, scores, _ = self.split(outputs, rows)
        return fractions(corners(boxes) if self.boxes == self.scores else boxes, size), scores


def place_parts(head: GraphHead, extra: int) -> tuple[int, int, int, int, float | None] | None:
    """`width`, `boxes`, `scores`, `extras`, `nms_iou` of outputs with so many columns after the classes; None: others.

    After a cut, scores come before boxes, and before columns of the same width.
    """
    flat = [
        (place, output.shape) for place, output in enumerate(head.outputs) if len(output.shape) == 2
    ]
    if len(flat) == 1:
        ((place, (channels, count)),) = flat
        width = channels - 4 - extra
        return (
            (width, place, place, place, 0.7)
            if width > 0 and head.strides(count, *STRIDES)
            else None
        )
    if head.cut is None or len(flat) != 3 or len({shape[0] for _, shape in flat}) > 1:
        return None
    sides = [output for output in flat if output[1][1] == 4]
    if not sides or not head.strides(flat[0][1][0], *STRIDES):
        return None
    (scores, (_, width)), (extras, (_, columns)) = (
        output for output in flat if output is not sides[-1]
    )
    # Scores usually come first; how many columns the extras have is known.
    if columns != extra:
        scores, width, extras, columns = extras, columns, scores, width
    iou = None if head.cut.operator == "TopK" else head.cut.attributes.get("iou_threshold", 0.7)
    return (width, sides[-1][0], scores, extras, iou) if columns == extra else None


@dataclass(frozen=True)
class YoloSeg(YoloParts):
    """YOLOv8-seg to YOLO26-seg: rows end with coefficients of the `prototypes` (M, h, w), another output."""

    name = "yolo-seg"
    words = WORDS + END2END_WORDS
    prototypes: int = 1

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One map, and as many coefficients as it has channels."""
        maps = [place for place, output in enumerate(head.outputs) if len(output.shape) == 3]
        parts = place_parts(head, head.outputs[maps[0]].shape[0]) if len(maps) == 1 else None
        return [cls(*parts, prototypes=maps[0])] if parts else []

    def shapes(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Mapping[str, Array]:
        """The coefficients of each row."""
        return {"coefficients": self.split(outputs, rows)[2]}


@dataclass(frozen=True)
class YoloObb(YoloParts):
    """YOLOv8-obb to YOLO26-obb: rows end with an angle in radians; boxes are centre and sides, also after a cut."""

    name = "yolo-obb"
    words = WORDS + END2END_WORDS

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """As the metadata say, or the sine and cosine by which the graph places boxes."""
        turned = head.metadata.get("task") == "obb" or any(
            output.tail >= ROTATION for output in head.outputs
        )
        parts = place_parts(head, 1) if turned else None
        return [cls(*parts)] if parts else []

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Boxes:
        """The upright boxes around the turned ones."""
        corner = self.shapes(outputs, size, rows)["corners"]
        library = library_of(corner)
        low, high = (edge(corner, 2) for edge in (library.amin, library.amax))
        return library.concatenate([low, high], -1), self.split(outputs, rows)[1]

    def shapes(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Mapping[str, Array]:
        """The corners (N, A, 4, 2) in fractions of the input."""
        boxes, _, angles = self.split(outputs, rows)
        turned = rotate_boxes(boxes, angles[..., 0])
        return {"corners": fractions(turned, size)}
