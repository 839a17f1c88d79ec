"""The path of an object over frames: where it leads, where it stands still, which lines it crosses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gemel.edge_runtime.events.zones import Point, Polygon, Segment, foot_point, is_inside, segments_meet, side_of

LEFT, RIGHT = "left", "right"
"""The ways across a line, for one who goes from its first to its second point."""


@dataclass(frozen=True, slots=True)
class PathConfig:
    """The tunables of paths."""

    memory_s: float = 1.0
    """Heading and speed are those of the last second: shorter, they are those of the jitter of boxes."""
    horizon_s: float = 1.0
    """How far ahead the path of an object is drawn that is no longer seen."""
    still_share: float = 0.25
    """An object stands still within so much of its box's side; the jitter of boxes is a tenth."""
    moved_share: float = 0.5
    """Within `memory_s` an object that has a heading moves by so much of its side."""
    heading_deg: float = 45.0
    """Most angle between a heading and the one asked for."""
    confirm_frames: int = 2
    """So many frames beyond a line, or away from where an object stood, are no jitter."""


DEFAULT_PATH = PathConfig()


@dataclass(frozen=True, slots=True)
class PathPoint:
    """An object in one frame: seconds, foot point in fractions, centre and mean side in pixels, and whether the frame's
    edge cuts it off."""

    at: float
    foot: Point
    centre: Point
    side: float
    is_cut: bool


def see_point(at: float, box: Sequence[float], size: tuple[int, int]) -> PathPoint:
    """The point of a box in pixels in a frame of this (width, height)."""
    x0, y0, x1, y1 = box
    is_cut = x0 <= 1 or y0 <= 1 or x1 >= size[0] - 1 or y1 >= size[1] - 1
    side = math.sqrt(max(1.0, (x1 - x0) * (y1 - y0)))
    return PathPoint(at, foot_point(box, size), ((x0 + x1) / 2, (y0 + y1) / 2), side, is_cut)


@dataclass(slots=True, eq=False)
class LineSide:
    """On which side of a line an object is for certain, where it was last seen there, and frames on the other since."""

    side: str
    anchor: Point
    frames_beyond: int = 0


@dataclass(slots=True, eq=False)
class TrackPath:
    """The newest points of an object; `still_at` is since when it stands still, and `sides` are those of lines."""

    config: PathConfig = DEFAULT_PATH
    points: deque[PathPoint] = field(default_factory=deque)
    still_at: float = 0.0
    sides: dict[str, LineSide] = field(default_factory=dict)
    _rest: Point = (0.0, 0.0)
    _frames_away: int = 0

    def add(self, point: PathPoint) -> None:
        """The next frame's point."""
        is_near = math.dist(point.centre, self._rest) <= self.config.still_share * point.side
        self._frames_away = 0 if is_near else self._frames_away + 1
        if not self.points or self._frames_away >= self.config.confirm_frames:
            self._rest, self.still_at, self._frames_away = point.centre, point.at, 0
        self.points.append(point)
        while point.at - self.points[0].at > self.config.memory_s and len(self.points) > 2:
            self.points.popleft()

    def heads_towards(self, direction: Point) -> bool:
        """Whether it moves, in pixels to the right and down, as `direction` points."""
        first, last = self.points[0], self.points[-1]
        x, y = last.centre[0] - first.centre[0], last.centre[1] - first.centre[1]
        length = math.hypot(x, y)
        if length < self.config.moved_share * last.side:
            return False
        cosine = (x * direction[0] + y * direction[1]) / (length * math.hypot(*direction))
        return cosine >= math.cos(math.radians(self.config.heading_deg))

    def leads_out(self, polygon: Polygon | None) -> bool:
        """Whether an object that is no longer seen went out of the frame, or of this zone in fractions of it."""
        first, last = self.points[0], self.points[-1]
        if last.is_cut:
            return True
        elapsed_s = last.at - first.at
        if elapsed_s <= 0:
            return False
        ahead = self.config.horizon_s / elapsed_s
        x = last.foot[0] + ahead * (last.foot[0] - first.foot[0])
        y = last.foot[1] + ahead * (last.foot[1] - first.foot[1])
        return not (0 < x < 1 and 0 < y < 1) or (polygon is not None and not is_inside(polygon, x, y))

    def cross(self, name: str, line: Segment) -> str | None:
        """The way, LEFT or RIGHT, in which the newest point has crossed a line for certain; None where it has not."""
        foot = self.points[-1].foot
        turn = side_of(*line, foot)
        before = self.sides.get(name)
        side = (LEFT if turn < 0 else RIGHT) if turn != 0 or before is None else before.side
        if before is None or before.side == side:
            self.sides[name] = LineSide(side, foot)
            return None
        before.frames_beyond += 1
        if before.frames_beyond < self.config.confirm_frames:
            return None
        self.sides[name] = LineSide(side, foot)
        return side if segments_meet(before.anchor, foot, *line) else None
