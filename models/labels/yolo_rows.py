"""What the numbers of a YOLO line mean: a box and what follows it, or the corners of a polygon.

Both may hold any count of numbers. All lines of one length are tested against both readings; where neither or both
fit, they are refused, since a wrong reading is a plausible box elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np


class RowReading(str, Enum):
    """How the numbers after the class are read."""

    BOX = "box"
    POLYGON = "polygon"


@dataclass(frozen=True)
class RowRules:
    """When lines fit a reading. `fitting` is the part of them that has to, each up to `slack` outside the picture.

    Polygons have at least `polygon_values` numbers; up to `triangle_values` a box that fits is enough for a box, since
    few data sets hold triangles. `polygon_lengths` lengths in one data set are those of polygons. Coordinates are 0 or
    1 in less than `edge_rows` lines. Of many lines about `sampled` are tested.
    """

    fitting: float = 0.95
    slack: float = 0.02
    box_slack: float = 0.1
    polygon_values: int = 6
    triangle_values: int = 7
    polygon_lengths: int = 3
    edge_rows: int = 10
    sampled: int = 200


RULES = RowRules()
BOX_VALUES = 4


class UnclearRowsError(Exception):
    """Why lines of one length have no clear meaning."""


def find_readings(
    rows: Mapping[int, Sequence[Sequence[float]]], has_keypoints: bool, has_outlines: bool = False
) -> dict[int, RowReading]:
    """The reading of all lines of each length, numbers after the class; raises UnclearRowsError.

    With `has_outlines` those that may be polygons are.
    """
    long = [length for length in rows if length >= RULES.polygon_values]
    # data.yaml says that points follow.
    if has_keypoints:
        return dict.fromkeys(rows, RowReading.BOX)
    # Boxes with more numbers have one length; polygons have many.
    if len(long) >= RULES.polygon_lengths:
        return {length: RowReading.POLYGON if length in long else RowReading.BOX for length in rows}
    readings = dict.fromkeys(rows, RowReading.BOX)
    for length, values in rows.items():
        if length == BOX_VALUES + 1:
            _check_fifth(np.array(values, float))
        elif length in long:
            sampled = np.array(values[:: -(-len(values) // RULES.sampled)], float)
            readings[length] = _choose_reading(sampled, has_outlines)
    return readings


def _check_fifth(values: np.ndarray) -> None:
    """Refuse lines of five numbers whose last is no score or track, or whose first is the score."""
    last = values[:, BOX_VALUES]
    boxes = _boxes_fit(values[:, :BOX_VALUES])
    is_score = bool(np.all((last >= 0) & (last <= 1)))
    if not is_score and not _is_whole(last):
        raise UnclearRowsError(
            f"a box and a fifth number such as {last[0]:g}, an angle or a box of another form"
        )
    # The score stands first, as some exporters write it.
    if not boxes and _boxes_fit(values[:, 1:]):
        raise UnclearRowsError("a score, and a box behind it: write the box first")


def _choose_reading(values: np.ndarray, has_outlines: bool) -> RowReading:
    count, length = values.shape
    points = values[:, : length // 2 * 2].reshape(count, -1, 2)
    following = values[:, BOX_VALUES:]
    has_numbers = any(_is_number(column) for column in following.T)
    has_box = _boxes_fit(values[:, :BOX_VALUES]) and (
        has_numbers
        or length <= RULES.triangle_values
        or any(_lie_within(values, following, step) for step in (2, 3))
    )
    has_polygon = (
        not has_numbers
        and _share((points >= -RULES.slack) & (points <= 1 + RULES.slack))
        and _share(np.array([[not crosses_itself(polygon)] for polygon in points]))
    )
    if has_box and has_polygon and not has_outlines:
        text = f"either a box and {length - BOX_VALUES} more numbers, or a polygon of {length // 2} points"
        raise UnclearRowsError(text)
    if not has_box and not has_polygon:
        text = f"neither a box and {length - BOX_VALUES} more numbers, nor a polygon of {length // 2} points"
        raise UnclearRowsError(f"{text} in the picture")
    return RowReading.POLYGON if has_polygon else RowReading.BOX


def _share(fits: np.ndarray) -> bool:
    """Whether enough lines (first axis) fit in all of their values."""
    return bool(fits.reshape(len(fits), -1).all(axis=1).mean() >= RULES.fitting)


def _boxes_fit(boxes: np.ndarray) -> bool:
    """Whether centre and size (N, 4) are boxes within the picture."""
    centre = boxes[:, :2]
    size = boxes[:, 2:]
    inside = (
        (centre - size / 2 >= -RULES.slack) & (centre + size / 2 <= 1 + RULES.slack) & (size > 0)
    )
    return _share(inside)


def _lie_within(values: np.ndarray, following: np.ndarray, step: int) -> bool:
    """Whether what follows are points, every `step` numbers, that lie in the box or are not labelled (0, 0)."""
    width = following.shape[1] // step * step
    if not width or following.shape[1] - width > 1 + (step == BOX_VALUES - 1):
        return False
    points = following[:, :width].reshape(len(values), -1, step)[:, :, :2]
    away = np.abs(points - values[:, None, :2])
    reach = (0.5 + RULES.box_slack) * values[:, None, 2:BOX_VALUES]
    unlabelled = np.all(points == 0, axis=2, keepdims=True)
    return _share((away <= reach) | unlabelled)


def _is_whole(values: np.ndarray) -> bool:
    return bool(np.all(values == np.round(values)))


def _is_number(column: np.ndarray) -> bool:
    """Whether these are whole numbers, which coordinates at the edges of a few pictures are too."""
    return _is_whole(column) and (bool(np.any(column > 1)) or len(column) >= RULES.edge_rows)


def crosses_itself(points: np.ndarray) -> bool:
    """Whether the closed line through these points (N, 2) crosses itself."""
    ends = np.roll(points, -1, axis=0)
    lines = ends - points
    for start, end, line in zip(points, ends, lines):
        # Two segments cross where the ends of each are on two sides of the other; neighbours share an end.
        sides = _cross_product(line, points - start)
        is_parted = sides * np.roll(sides, -1) < 0
        parts = _cross_product(lines, start - points) * _cross_product(lines, end - points) < 0
        if np.any(is_parted & parts):
            return True
    return False


def _cross_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left[..., 0] * right[..., 1] - left[..., 1] * right[..., 0]
