"""YOLOv8-pose to YOLO26-pose as Ultralytics exports them: boxes, scores, and the points of each object in pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemel.models.arrays import library_of
from gemel.models.decoders.decoder import (
    Decoder,
    GraphHead,
    Outputs,
    Poses,
    class_names,
    point_shape,
)
from gemel.models.decoders.grids import ALL_ROWS, Rows, fractions
from gemel.models.decoders.yolo import STRIDES
from gemel.models.decoders.yolo_parts import YoloParts, place_parts
from gemel.models.preprocess import Size

DIMS = 3
"""Values of a point where the metadata do not say it: x, y and whether it is visible."""


@dataclass(frozen=True)
class YoloPose(YoloParts):
    """YOLOv8-pose to YOLO26-pose: boxes, scores, and the points of each object.

    Rows end with the points: `count` is K, `dims` is D, K x D columns.
    """

    name = "yolo-pose"
    task = "keypoints"
    key = "kpt_shape"
    count: int = 0
    dims: int = DIMS

    @classmethod
    def fit(cls, head: GraphHead) -> Sequence[Decoder]:
        """One output with a column for each cell, or three that entered what was cut off."""
        shapes = [output.shape for output in head.outputs]
        names = class_names(head.metadata)
        shape = point_shape(head.metadata)
        if shape is not None:
            parts = place_parts(head, shape[0] * shape[1])
            return [cls(*parts, *shape)] if parts and len(shapes) in (1, 3) else []
        if len(shapes) != 1 or len(shapes[0]) != 2 or not head.strides(shapes[0][1], *STRIDES):
            return []
        values = shapes[0][0] - 4
        return list(_guesses(values, range(1, values) if names is None else [len(names)]))

    def decode(self, outputs: Outputs, size: Size, rows: Rows = ALL_ROWS) -> Poses:  # type: ignore[override]
        """Boxes and points as fractions; a point without a third value is certain."""
        points = self.split(outputs, rows)[2]
        library = library_of(points)
        points = points.reshape(*points.shape[:2], self.count, self.dims)
        certainty = points[..., 2:3] if self.dims > 2 else library.ones_like(points[..., :1])
        placed = library.concatenate([fractions(points[..., :2], size), certainty], -1)
        return (*super().decode(outputs, size, rows), placed)


def _guesses(values: int, widths: Sequence[int]) -> Iterator[YoloPose]:
    """The class counts, fewest first, that leave whole points."""
    for width in widths:
        if values - width > 0 and (values - width) % DIMS == 0:
            yield YoloPose(width, count=(values - width) // DIMS)
