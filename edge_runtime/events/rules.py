"""The keys of one query in a box config: tracking, zones, filters, events, motion gating and hours."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gemel.edge_runtime.events.timetable import Timetable, check_time_zone, parse_week_span
from gemel.edge_runtime.events.tracking import MIN_TRACKING_FPS
from gemel.edge_runtime.events.zones import (
    DetectionFilter,
    Point,
    Polygon,
    Segment,
    find_line_problem,
    find_polygon_problem,
    open_polygon,
)
from gemel.models.bundle import BundleQuery
from gemel.models.errors import InputError
from gemel.models.files.io import MAX_QUERIES, Name
from gemel.models.tasks import task_of

MAX_RULES, MAX_ZONES, MAX_WINDOW = 32, 32, 100
WINDOW_S = 0.6


class EventKind(str, Enum):
    """What an event is about."""

    __str__ = str.__str__

    ENTER = "enter"
    LEAVE = "leave"
    LOST = "lost"
    DWELL = "dwell"
    STILL = "still"
    HEADING = "heading"
    CROSS = "cross"
    COUNT = "count"
    LABEL_CHANGES = "label-changes"


WITHOUT_TRACKS = (EventKind.COUNT, EventKind.LABEL_CHANGES)
KINDS_OF_KEY = {
    "seconds": (EventKind.DWELL, EventKind.STILL),
    "at_least": (EventKind.COUNT,),
    "line": (EventKind.CROSS,),
    "towards": (EventKind.HEADING,),
}
"""By key the kinds that need it, and that alone have it."""


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """A condition holds once it was seen in `count` of the last `window` frames, and until it was not in as many."""

    count: int = 3
    window: int = 5

    @classmethod
    def of_rate(cls, fps: float) -> Hysteresis:
        """The default: 3 of 5 frames, or three fifths of WINDOW_S where that is longer.

        On labelled footage at 25 frames a second 9 of 15 frames avoid a third of the false events of 3 of 5.
        """
        window = min(MAX_WINDOW, max(5, round(WINDOW_S * fps)))
        return cls(math.ceil(window * 3 / 5), window)


@dataclass(frozen=True, slots=True)
class EventRule:
    """One rule: a `zone` None is the whole frame, `polygon` its points; empty `classes` are all. `seconds` are of a
    dwell or a rest, `at_least` of a count, `line` and `segment` of a crossing, in one `direction` where not None, and
    `towards` of a heading, pixels to the right and down. With `follows_rate` the hysteresis is that of the query's
    rate."""

    name: str
    kind: EventKind
    zone: str | None = None
    classes: frozenset[str] = frozenset()
    seconds: float = 0.0
    at_least: int = 1
    frames: Hysteresis = Hysteresis()
    follows_rate: bool = False
    polygon: Polygon | None = None
    line: str | None = None
    segment: Segment = ((0.0, 0.0), (0.0, 0.0))
    direction: str | None = None
    towards: Point = (0.0, 0.0)

    @property
    def needs_tracks(self) -> bool:
        """Whether it follows objects."""
        return self.kind not in WITHOUT_TRACKS

    def at_rate(self, fps: float) -> EventRule:
        """The rule for so many frames a second."""
        return replace(self, frames=Hysteresis.of_rate(fps)) if self.follows_rate else self


@dataclass(frozen=True, slots=True)
class QueryRules:
    """What a box does with the answers and frames of one query; with `one_box` an object has one box of one class."""

    tracking: bool = False
    one_box: bool = False
    zones: Mapping[str, Polygon] = field(default_factory=dict)
    lines: Mapping[str, Segment] = field(default_factory=dict)
    filter: DetectionFilter = field(default_factory=DetectionFilter)
    events: tuple[EventRule, ...] = ()
    motion_gating: bool = False
    schedule: Timetable | None = None


def _parse_hysteresis(given: Any) -> Any:
    found = re.fullmatch(r"(\d{1,3}) of (\d{1,3})", str(given).strip())
    if found is None:
        raise ValueError("write it like 3 of 5")
    count, window = int(found[1]), int(found[2])
    if not (0 < count <= window <= MAX_WINDOW and 2 * count > window):
        raise ValueError(f"the first number is more than half of the second, which is at most {MAX_WINDOW}")
    return Hysteresis(count, window)


def _check_polygon(polygon: Polygon) -> Polygon:
    polygon = open_polygon(polygon)
    if problem := find_polygon_problem(polygon):
        raise ValueError(problem)
    return polygon


def _check_line(line: tuple[Point, ...]) -> tuple[Point, ...]:
    if problem := find_line_problem(line):
        raise ValueError(problem)
    return line


def _check_towards(towards: Point) -> Point:
    if towards == (0, 0):
        raise ValueError("[0, 0] points nowhere: [1, 0] is to the right, [0, 1] down")
    return towards


Fraction = Annotated[float, Field(ge=0, le=1)]
ZonePolygon = Annotated[tuple[tuple[float, float], ...], AfterValidator(_check_polygon)]
_Line = Annotated[tuple[Point, ...], AfterValidator(_check_line)]
_Towards = Annotated[Point, AfterValidator(_check_towards)]
_Frames = Annotated[Any, BeforeValidator(_parse_hysteresis)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _EventKeys(_Keys):
    kind: EventKind
    name: Name | None = None
    zone: str | None = None
    classes: list[str] = []
    seconds: Annotated[float, Field(gt=0, le=86_400)] | None = None
    at_least: Annotated[int, Field(ge=1, le=10_000)] | None = None
    line: str | None = None
    direction: Literal["left", "right"] | None = None
    towards: _Towards | None = None
    frames: _Frames | None = None

    @model_validator(mode="after")
    def _check_keys_of_kind(self) -> _EventKeys:
        for key, kinds in KINDS_OF_KEY.items():
            if self.kind in kinds and getattr(self, key) is None:
                raise ValueError(f"the kind {self.kind} needs `{key}`")
            if self.kind not in kinds and getattr(self, key) is not None:
                raise ValueError(f"`{key}` belongs to the kind {' or '.join(kinds)} and no other: leave it out")
        if self.direction is not None and self.kind is not EventKind.CROSS:
            raise ValueError("`direction` is a way across a line: leave it out; a heading has `towards`")
        if self.kind is EventKind.LABEL_CHANGES and self.zone is not None:
            raise ValueError("a label is that of the whole frame: leave `zone` out")
        return self

    @property
    def rule_name(self) -> str:
        """Its name, or that of its kind and place."""
        place = self.zone or self.line
        return self.name or (f"{self.kind}-{place}" if place else str(self.kind))

    def to_rule(self, zones: Mapping[str, Polygon], lines: Mapping[str, Segment]) -> EventRule:
        """The rule with its zone and line out of these."""
        return EventRule(
            name=self.rule_name,
            kind=self.kind,
            zone=self.zone,
            classes=frozenset(self.classes),
            seconds=self.seconds or 0.0,
            at_least=self.at_least or 1,
            frames=self.frames or Hysteresis(),
            follows_rate=self.frames is None,
            polygon=None if self.zone is None else zones[self.zone],
            line=self.line,
            segment=((0.0, 0.0), (0.0, 0.0)) if self.line is None else lines[self.line],
            direction=self.direction,
            towards=self.towards or (0.0, 0.0),
        )


class _ScheduleKeys(_Keys):
    zone: Annotated[str, AfterValidator(check_time_zone)]
    on: Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]

    @model_validator(mode="before")
    @classmethod
    def _check_zone_is_given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("write it like {zone: Europe/London, on: mon-fri 07:00-19:00}")
        given = {"on" if key is True else key: value for key, value in given.items()}  # YAML 1.1 reads `on` as true
        if "zone" not in given:
            raise ValueError("hours need a time zone: add `zone`, such as Europe/London or UTC")
        return given

    @model_validator(mode="after")
    def _check_spans(self) -> _ScheduleKeys:
        self.to_timetable()
        return self

    def to_timetable(self) -> Timetable:
        """The hours; ValueError where a span cannot be read."""
        if not self.on:
            raise ValueError("`on` has no hours: leave the schedule out, or the query out of the bundle")
        return Timetable(self.zone, tuple(map(parse_week_span, self.on)))


class QueryKeys(_Keys):
    """The keys of a query in a box config."""

    tracking: bool = False
    one_box: bool | None = None
    zones: Annotated[dict[Name, ZonePolygon], Field(max_length=MAX_ZONES)] = {}
    lines: Annotated[dict[Name, _Line], Field(max_length=MAX_ZONES)] = {}
    include: list[str] = []
    exclude: list[str] = []
    min_area: Fraction = 0.0
    max_area: Fraction = 1.0
    min_score: Annotated[
        dict[str, Fraction], BeforeValidator(lambda given: given if isinstance(given, dict) else {"": given})
    ] = {}
    events: Annotated[list[_EventKeys], Field(max_length=MAX_RULES)] = []
    motion_gating: bool = False
    schedule: _ScheduleKeys | None = None

    @model_validator(mode="after")
    def _check_together(self) -> QueryKeys:
        used = [*self.include, *self.exclude, *(event.zone for event in self.events if event.zone is not None)]
        for zone in used:
            if zone not in self.zones:
                raise ValueError(f"no zone '{zone:.60}' here: `zones` has {', '.join(self.zones) or 'none'}")
        for event in self.events:
            if event.line is not None and event.line not in self.lines:
                raise ValueError(f"no line '{event.line:.60}' here: `lines` has {', '.join(self.lines) or 'none'}")
        if both := sorted({*self.include} & {*self.exclude}):
            raise ValueError(f"the zone '{both[0]}' is in `include` and in `exclude`, so that nothing in it passes")
        if self.min_area > self.max_area:
            raise ValueError("`min_area` is above `max_area`, so that nothing passes")
        names = [event.rule_name for event in self.events]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two events are called '{name}': give one of them a `name`")
        for event in self.events:
            if event.kind not in WITHOUT_TRACKS and not self.tracking:
                raise ValueError(f"the event '{event.rule_name}' follows objects: add `tracking: true`")
        return self

    def to_rules(self) -> QueryRules:
        """The rules."""
        own = DetectionFilter(
            tuple(self.include), tuple(self.exclude), self.min_area, self.max_area, dict(self.min_score)
        )
        hours = None if self.schedule is None else self.schedule.to_timetable()
        lines = {name: (line[0], line[1]) for name, line in self.lines.items()}
        return QueryRules(
            tracking=self.tracking,
            one_box=self.tracking if self.one_box is None else self.one_box,
            zones=dict(self.zones),
            lines=lines,
            filter=own,
            events=tuple(event.to_rule(self.zones, lines) for event in self.events),
            motion_gating=self.motion_gating,
            schedule=hours,
        )


RulesByQuery = Annotated[dict[Name, QueryKeys], Field(max_length=MAX_QUERIES)]


def check_rules(
    path: Path,
    rules: Mapping[str, QueryRules],
    queries: Collection[BundleQuery],
    push_cameras: Collection[str],
    rates: Mapping[str, float],
) -> None:
    """Raise InputError, naming the key, where rules do not fit the queries of a bundle, each with its frames a second,
    or their cameras."""
    known = {query.id: query for query in queries}
    for name, own in rules.items():
        key = f"queries.{name}"
        if name not in known:
            raise InputError(path, "the bundle has no such query", f"it has {', '.join(known)}", key)
        _check_task(path, key, own, known[name])
        if own.tracking and rates[name] < MIN_TRACKING_FPS:
            problem = f"it needs {MIN_TRACKING_FPS:g} frames a second, and the query gets {rates[name]:g}"
            raise InputError(path, problem, "raise `fps`, or leave tracking and its events out", f"{key}.tracking")
        if own.motion_gating and known[name].camera in push_cameras:
            problem = f"each frame of the push camera {known[name].camera} is answered, so none can be skipped"
            raise InputError(path, problem, "leave it out", f"{key}.motion_gating")


def _check_task(path: Path, key: str, own: QueryRules, query: BundleQuery) -> None:
    task = task_of(query)
    needs_boxes = {
        "tracking": own.tracking,
        "one_box": own.one_box,
        "zones": own.zones,
        "lines": own.lines,
        "include, exclude, areas and scores": not own.filter.is_empty,
    }
    for what, used in needs_boxes.items():
        if used and not task.has_boxes:
            problem = f"a query of the task {query.task} has no boxes, which {what} need"
            raise InputError(path, problem, "leave them out, or use a query of the task detection", key)
    classes = {name for name in own.filter.min_score if name}
    for rule in own.events:
        classes |= rule.classes
        is_label = rule.kind is EventKind.LABEL_CHANGES
        if not (task.has_label if is_label else task.has_boxes):
            needed = "one label a frame" if is_label else "boxes"
            problem = f"the event '{rule.name}' needs {needed}, which a query of the task {query.task} does not give"
            raise InputError(path, problem, "leave it out", f"{key}.events")
    for name in sorted(classes - set(query.classes)):
        raise InputError(path, f"the query has no class '{name:.60}'", f"it has {', '.join(query.classes)}", key)
