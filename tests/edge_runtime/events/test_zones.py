"""Zones contain what stands in them; filters and hours decide as they are written."""

from __future__ import annotations

import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.events.timetable import Timetable, parse_week_span
from gemel.edge_runtime.events.zones import (
    DetectionFilter,
    find_polygon_problem,
    foot_point,
    is_inside,
    open_polygon,
    polygon_area,
)

SQUARE = ((0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8))
NOTCHED = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.3), (0.0, 1.0))


@pytest.mark.parametrize(
    ("polygon", "problem"),
    [
        (SQUARE, None),
        (NOTCHED, None),
        (((0, 0), (1, 1), (1, 0), (0, 1)), "cross"),
        (((0, 0), (0.5, 0), (0.5, 0.5), (0.25, 0), (0, 0.5)), "cross"),
        (((0, 0), (1.2, 0), (1, 1)), "outside the frame"),
        (((0, 0), (1, 1)), "3 to 100 points"),
        (((0, 0), (0.5, 0.5), (1, 1)), "on a line"),
        (((0, 0), (0, 0), (1, 0), (1, 1)), "comes twice"),
        (open_polygon((*SQUARE, SQUARE[0])), None),
    ],
)
def test_polygon_problem_names_what_is_wrong(polygon, problem) -> None:
    found = find_polygon_problem(polygon)
    assert found is None if problem is None else found is not None and problem in found


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_inside_of_convex_polygon_agrees_with_its_half_planes(x: float, y: float) -> None:
    assert is_inside(SQUARE, x, y) is (0.2 <= x < 0.8 and 0.2 <= y < 0.8)


def test_inside_leaves_out_the_notch() -> None:
    assert is_inside(NOTCHED, 0.1, 0.5) and not is_inside(NOTCHED, 0.5, 0.6)
    assert polygon_area(NOTCHED) == pytest.approx(0.65)


def test_foot_point_is_the_middle_of_the_lower_edge_within_the_frame() -> None:
    assert foot_point((10, 0, 30, 50), (100, 200)) == (0.2, 0.25)
    assert is_inside(((0, 0), (1, 0), (1, 1), (0, 1)), *foot_point((90, 100, 130, 240), (100, 200)))


@pytest.mark.parametrize(
    ("keys", "zones", "passes"),
    [
        ({"include": ("a",)}, ["a"], True),
        ({"include": ("a",)}, ["b"], False),
        ({"exclude": ("a",)}, ["a", "b"], False),
        ({"min_area": 0.02}, [], False),
        ({"min_area": 0.005, "max_area": 0.02}, [], True),
        ({"max_area": 0.005}, [], False),
        ({"min_score": {"car": 0.6}}, [], False),
        ({"min_score": {"": 0.6, "car": 0.4}}, [], True),
    ],
)
def test_filter_passes_by_zone_area_and_score(keys, zones, passes) -> None:
    detection = {"class": "car", "score": 0.5, "box": [0, 0, 10, 20]}  # a hundredth of the frame
    assert DetectionFilter(**keys).passes(detection, zones, (100, 200)) is passes


@pytest.mark.parametrize(
    ("text", "moment", "is_on"),
    [
        ("mon-fri 07:00-19:00", "2026-11-26T07:00", True),  # a Thursday
        ("mon-fri 07:00-19:00", "2026-11-26T19:00", False),
        ("sat,sun 00:00-24:00", "2026-11-26T12:00", False),
        ("sat,sun 00:00-24:00", "2026-11-29T23:59", True),
        ("fri-mon 08:00-09:00", "2026-11-29T08:30", True),
        ("thu 22:00-06:00", "2026-11-27T05:59", True),
        ("thu 22:00-06:00", "2026-11-26T05:59", False),
        ("22:00-06:00", "2026-11-26T05:59", True),
    ],
)
def test_timetable_is_on_in_local_time(text, moment, is_on) -> None:
    zone = "America/New_York"
    at = datetime.datetime.fromisoformat(moment).replace(tzinfo=ZoneInfo(zone))
    assert Timetable(zone, (parse_week_span(text),)).is_on(at.timestamp()) is is_on


@pytest.mark.parametrize(
    "text", ["", "mon", "moonday 07:00-08:00", "mon 7-8", "07:00-25:00", "07:60-08:00", "8:00-8:00"]
)
def test_week_span_that_cannot_be_read_is_refused(text) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_week_span(text)
