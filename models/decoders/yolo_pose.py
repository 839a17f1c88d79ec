"""YOLOv8-pose to YOLO26-pose as Ultralytics exports them: boxes, scores, and the points of each object in pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gemel.models.arrays import Array, as_float, constant, library_of
from gemel.models.decoders.families import YOLO, family_preprocess
from gemel.models.decoders.grids import ALL_ROWS, Rows, corners, fractions
from gemel.models.decoders.registry import Decoder, GraphHead, Poses, class_names, point_shape, register
from gemel.models.preprocess import Preprocess, Size

STRIDES = ((8, 16, 32), (8, 16, 32, 64))
DIMS = 3
"""Values of a point where the metadata do not say it: x, y and whether it is visible."""


@register
@dataclass(frozen=True)
class YoloPose(Decoder):
    """`boxes`, `scores` and `points` are indices of outputs, equal where one output (4 + C + K x D, A) has them.

    The boxes of several are corners, as a top-k or a suppression that was cut off read them; those of one are centre
    and sides. `count` is K, `dims` is D.
    """

    name = "yolo-pose"
    task = "keypoints"
    key = "kpt_shape"
    width: int
    count: int
    dims: int = DIMS
    boxes: int = 0
    scores: int = 0
    points: int = 0
    nms_iou: float | None = 0.7

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One output with a column for each cell, or three that entered what was cut off."""
        shapes, known = [output.shape for output in head.outputs], point_shape(head.metadata)
        count, names = head.cells(STRIDES[0]), class_names(head.metadata)
        if len(shapes) == 1 and len(shapes[0]) == 2 and head.strides(shapes[0][1], *STRIDES):
            values = shapes[0][0] - 4
            if known is None:
                widths = range(1, values) if names is None else [len(names)]
                return list(_guesses(values, widths))
            width = values - known[0] * known[1]
            return [cls(width, *known)] if width > 0 else []
        if head.cut is None or known is None or any(shape[:1] != (count,) for shape in shapes):
            return []
        found = {shape[1]: place for place, shape in enumerate(shapes) if len(shape) == 2}
        rest = [place for place in range(len(shapes)) if place not in (found.get(4), found.get(known[0] * known[1]))]
        if len(shapes) != 3 or len(rest) != 1:
            return []
        iou = None if head.cut.operator == "TopK" else head.cut.attributes.get("iou_threshold", cls.nms_iou)
        return [cls(shapes[rest[0]][1], *known, found[4], rest[0], found[known[0] * known[1]], iou)]

    def preprocess(self, metadata: Mapping[str, str], size: Size) -> Preprocess | None:
        """Letterbox in the middle, values 0..1."""
        return family_preprocess(metadata, size, YOLO)

    def bounds(self, outputs: Sequence[Array]) -> Array:
        """The best score of each row."""
        if self.boxes == self.scores:
            return outputs[self.boxes][:, 4 : 4 + self.width].max(1)
        return outputs[self.scores].max(-1)

    def decode(self, outputs: Sequence[Array], size: Size, rows: Rows = ALL_ROWS) -> Poses:
        """Boxes and points as fractions; a point without a third value is certain."""
        if self.boxes == self.scores:
            values = as_float(outputs[self.boxes])[..., rows].swapaxes(1, 2)
            boxes, scores = corners(values[..., :4]), values[..., 4 : 4 + self.width]
            points = values[..., 4 + self.width :]
        else:
            places = (self.boxes, self.scores, self.points)
            boxes, scores, points = (as_float(outputs[place])[:, rows] for place in places)
        library = library_of(points)
        points = points.reshape(*points.shape[:2], self.count, self.dims)
        places = points[..., :2] / constant([size[1], size[0]], points)
        certainty = points[..., 2:3] if self.dims > 2 else library.ones_like(points[..., :1])
        return fractions(boxes, size), scores, library.concatenate([places, certainty], -1)


def _guesses(values: int, widths: Sequence[int]) -> Iterator[YoloPose]:
    """The class counts, fewest first, that leave whole points."""
    for width in widths:
        if values - width > 0 and (values - width) % DIMS == 0:
            yield YoloPose(width, (values - width) // DIMS)
