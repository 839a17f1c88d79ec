"""Zones: polygons in fractions of the frame, the objects that stand in them, and the filters of detections."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Point = tuple[float, float]
Polygon = tuple[Point, ...]
Segment = tuple[Point, Point]
MIN_POINTS, MAX_POINTS = 3, 100
MIN_POLYGON_AREA = 1e-4
"""Of the frame; a smaller zone is a line or a point."""
MIN_LINE_LENGTH = 0.01
"""Of the frame; no object is seen on both sides of a shorter line's ends."""


def find_polygon_problem(polygon: Sequence[Point]) -> str | None:
    """Why these points, in fractions of the frame, are no zone; None where they are.

    A last point that repeats the first, as GeoJSON has it, is left out by `open_polygon` before.
    """
    if not MIN_POINTS <= len(polygon) <= MAX_POINTS:
        return f"a zone has {MIN_POINTS} to {MAX_POINTS} points"
    for x, y in polygon:
        if not (0 <= x <= 1 and 0 <= y <= 1):
            return f"the point [{x:g}, {y:g}] lies outside the frame: points are fractions of it, 0 to 1"
    for place, (x, y) in enumerate(polygon):
        if (x, y) in polygon[:place]:
            return f"the point [{x:g}, {y:g}] comes twice: give each corner once"
    edges = list(zip(polygon, (*polygon[1:], polygon[0]), strict=True))
    for (place, first), (other, second) in combinations(enumerate(edges), 2):
        are_neighbours = other - place in (1, len(edges) - 1)
        if not are_neighbours and segments_meet(*first, *second):
            return f"its sides {place + 1} and {other + 1} cross: give the points in order around the zone"
    if polygon_area(polygon) < MIN_POLYGON_AREA:
        return f"it has no area: its points lie on a line, or within {MIN_POLYGON_AREA:g} of the frame"
    return None


def find_line_problem(line: Sequence[Point]) -> str | None:
    """Why these points, in fractions of the frame, are no line to cross; None where they are."""
    if len(line) != 2:
        return "a line has two points: write it like [[0, 0.5], [1, 0.5]]"
    for x, y in line:
        if not (0 <= x <= 1 and 0 <= y <= 1):
            return f"the point [{x:g}, {y:g}] lies outside the frame: points are fractions of it, 0 to 1"
    if math.dist(*line) < MIN_LINE_LENGTH:
        return f"it has no length: its points are within {MIN_LINE_LENGTH:g} of the frame"
    return None


def open_polygon(polygon: Polygon) -> Polygon:
    """The polygon without a last point that repeats the first."""
    return polygon[:-1] if len(polygon) > MIN_POINTS and polygon[0] == polygon[-1] else polygon


def polygon_area(polygon: Sequence[Point]) -> float:
    """The area, by the shoelace formula."""
    pairs = zip(polygon, (*polygon[1:], polygon[0]), strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def segments_meet(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Whether the segments a-b and c-d have a point in common."""
    sides = side_of(a, b, c), side_of(a, b, d), side_of(c, d, a), side_of(c, d, b)
    if sides[0] * sides[1] < 0 and sides[2] * sides[3] < 0:
        return True
    ends = ((a, b, c), (a, b, d), (c, d, a), (c, d, b))
    return any(side == 0 and _is_between(*three) for side, three in zip(sides, ends, strict=True))


def side_of(a: Point, b: Point, c: Point) -> float:
    """Above 0 where c is to the right of one who goes from a to b (y points down), below to the left, 0 on the line."""
    turn = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
    return 0.0 if abs(turn) < 1e-12 else turn


def is_inside(polygon: Polygon, x: float, y: float) -> bool:
    """Whether a point is in the polygon, by the even-odd rule; its edge to the left and above belongs to it."""
    inside = False
    x1, y1 = polygon[-1]
    for x0, y0 in polygon:
        if (y0 > y) != (y1 > y) and x < (x1 - x0) * (y - y0) / (y1 - y0) + x0:
            inside = not inside
        x1, y1 = x0, y0
    return inside


def foot_point(box: Sequence[float], size: tuple[int, int]) -> Point:
    """The middle of a box's lower edge, where an object meets the ground, in fractions of a frame (width, height)."""
    width, height = size
    return min(max((box[0] + box[2]) / 2 / width, 0.0), 1 - 1e-9), min(max(box[3] / height, 0.0), 1 - 1e-9)


@dataclass(frozen=True, slots=True)
class DetectionFilter:
    """Which detections are results: in an `include` zone and in no `exclude` zone, of an area (fraction of the frame)
    from `min_area` to `max_area`, with the score that their class needs (`""`: every class without its own)."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_area: float = 0.0
    max_area: float = 1.0
    min_score: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether every detection passes."""
        return self == DetectionFilter()

    def passes(self, detection: Mapping[str, Any], zones: Collection[str], size: tuple[int, int]) -> bool:
        """Whether a detection of a result, which is in these zones, passes in a frame of this (width, height)."""
        x0, y0, x1, y1 = detection["box"]
        area = max(0.0, x1 - x0) * max(0.0, y1 - y0) / (size[0] * size[1])
        needed = self.min_score.get(detection["class"], self.min_score.get("", 0.0))
        return (
            self.min_area <= area <= self.max_area
            and detection["score"] >= needed
            and (not self.include or any(name in zones for name in self.include))
            and not any(name in zones for name in self.exclude)
        )


def _is_between(a: Point, b: Point, c: Point) -> bool:
    return min(a[0], b[0]) <= c[0] <= max(a[0], b[0]) and min(a[1], b[1]) <= c[1] <= max(a[1], b[1])
