"""A box with rules: tracks and zones in results, events in its sinks, hours, motion, and bad rules in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemel.edge_runtime.events.rules import check_rules
from gemel.edge_runtime.events.stage import EventStage
from gemel.edge_runtime.life.box import load_box
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.errors import InputError
from tests.edge_runtime.events.bright import PARTS, SIDE, write_spot_box
from tests.edge_runtime.local_box import LocalBox

PASSES = [None, None, *range(0, 28, 2), *[27] * 6, *[None] * 4]
"""A spot that comes from the left and stays at the right."""
ENTER = {"tracking": True, **PARTS, "events": [{"kind": "enter", "zone": "right", "frames": "2 of 3"}]}
EVENT_KEYS = {"type", "run", "query", "camera", "event", "open", "before", "after"}


def read_events(box: LocalBox) -> list[dict[str, Any]]:
    return [record for record in box.records() if "event" in record]


def test_box_sends_one_message_at_the_start_and_one_at_the_end(tmp_path: Path) -> None:
    config = write_spot_box(tmp_path, PASSES, {"spot": ENTER})
    summary = run(config)
    assert summary["balanced"] and summary["stopped_by"] == "cameras ended"
    box = LocalBox(config)
    results = [record for record in box.records("spot") if "detections" in record]
    tracks = {one["track"] for record in results for one in record["detections"] if "track" in one}
    assert len(results) == len(PASSES) and len(tracks) == 1
    start, end = read_events(box)
    assert (start["type"], end["type"], start["open"], end["open"]) == ("new", "end", 1, 0)
    assert start.keys() == end.keys() == EVENT_KEYS
    event = end["after"]
    assert (event["kind"], event["zone"], event["label"], event["track"]) == ("enter", "right", "car", tracks.pop())
    assert start["after"]["end_time"] is None and event["start_time"] == start["after"]["start_time"]
    in_zone = [one["captured_at"] for one in results if any(two["zones"] for two in one["detections"])]
    assert event["start_time"] == pytest.approx(in_zone[0], abs=0.002) and event["end_time"] <= in_zone[-1] + 0.002


def test_picture_shows_zones_and_lines_of_its_queries(tmp_path: Path) -> None:
    rules = {**PARTS, "lines": {"kerb": [[0, 0.5], [1, 0.5]]}}
    config = load_config(write_spot_box(tmp_path, [4], {"spot": rules}))
    stage = EventStage("run", lambda message: None)
    stage.change({query.id: query for query in load_box(config).bundle.queries}, config.rules, {"spot": 5.0})
    assert [name for name, _ in stage.places("left")] == ["right", "kerb"] and stage.places("back") == []


def test_filter_leaves_detections_out_of_results(tmp_path: Path) -> None:
    config = write_spot_box(tmp_path, PASSES, {"spot": {**PARTS, "exclude": ["right"]}})
    run(config)
    boxes = [one["box"] for record in LocalBox(config).records("spot") for one in record["detections"]]
    assert len(boxes) == len(range(0, 14, 2)) and all((box[0] + box[2]) / 2 < SIDE / 2 for box in boxes)


def test_gated_query_answers_frames_that_move_and_counts_the_others_as_still(tmp_path: Path) -> None:
    places = [4] * 10 + [20] * 10
    config = write_spot_box(tmp_path, places, {"spot": {"motion_gating": True}})
    summary = run(config)
    counts = {row["query"]: row for row in summary["ledger"]}
    assert summary["balanced"]
    spot, kind = counts["spot"], counts["kind"]
    assert spot["received"] == kind["received"] == kind["processed"] == len(places)
    assert spot["dropped"]["still"] == len(places) - spot["processed"] > 0
    found = [record["detections"][0]["box"][0] for record in LocalBox(config).records("spot")]
    assert set(found) == {4.0, 20.0}


def test_dwell_of_a_still_object_begins_while_its_frames_are_skipped(tmp_path: Path) -> None:
    rules = {"tracking": True, "motion_gating": True, "events": [{"kind": "dwell", "seconds": 1, "frames": "1 of 1"}]}
    config = write_spot_box(tmp_path, [4, 5, 6, 7] + [8] * 30, {"spot": rules})
    summary = run(config)
    start, end = read_events(LocalBox(config))
    assert next(row for row in summary["ledger"] if row["query"] == "spot")["dropped"]["still"] > 20
    assert end["after"]["end_time"] - start["after"]["start_time"] >= 1.0
    assert end["after"]["end_reason"] == "camera-away"


def test_query_off_by_its_hours_gets_no_frames(tmp_path: Path) -> None:
    hours = {"zone": "UTC", "on": "mon-sun 00:00-24:00"}
    never = {"zone": "UTC", "on": ["mon 00:00-00:01"]}
    rules = {"spot": {"schedule": hours}, "kind": {"schedule": never}}
    config = write_spot_box(tmp_path, [4] * 5, rules)
    counts = {row["query"]: row["received"] for row in run(config)["ledger"]}
    assert counts == {"spot": 5, "kind": 0}


def test_reload_keeps_open_events_of_unchanged_rules_and_ends_others(tmp_path: Path) -> None:
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    rules = {"spot": ENTER}
    with LocalBox(write_spot_box(tmp_path, [20, 21], rules, cameras=cameras, http={"bind": "127.0.0.1:0"})) as box:
        box.until(lambda: len(read_events(box)) == 1)
        assert read_events(box)[0]["after"]["has_snapshot"] and box.service._runtime.events.thumbnail(
            read_events(box)[0]["after"]["id"]
        )
        (tmp_path / "clip2").symlink_to("clip")
        path = tmp_path / "box.yaml"
        text = path.read_text()
        path.write_text(text.replace("late: drop\n", "") + "late: drop\n")
        assert box.reload() is None
        box.more("spot", count=5)
        assert len(read_events(box)) == 1
        path.write_text(path.read_text().replace("2 of 3", "3 of 4"))
        assert box.reload() is None
        box.until(lambda: len(read_events(box)) == 3)
    first, ended, second, stopped = read_events(box)
    assert [one["type"] for one in (first, ended, second, stopped)] == ["new", "end", "new", "end"]
    assert (ended["after"]["end_reason"], ended["after"]["id"]) == ("reload", first["after"]["id"])
    assert (stopped["after"]["end_reason"], second["after"]["id"]) == ("stopped", stopped["after"]["id"])


BAD_RULES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a polygon that crosses itself": (
        lambda: {"zones": {"x": [[0, 0], [1, 1], [1, 0], [0, 1]]}},
        "queries.spot.zones.x",
    ),
    "a polygon outside": (lambda: {"zones": {"x": [[0, 0], [2, 0], [1, 1]]}}, "outside the frame"),
    "an unknown zone": (lambda: {"include": ["x"]}, "no zone 'x'"),
    "a schedule without a zone": (lambda: {"schedule": {"on": "07:00-08:00"}}, "time zone"),
    "a zone of no map": (lambda: {"schedule": {"zone": "Mars/Base", "on": "07:00-08:00"}}, "Mars/Base"),
    "no hours": (lambda: {"schedule": {"zone": "UTC", "on": "sometimes"}}, "sometimes"),
    "an unknown class": (lambda: {"min_score": {"lorry": 0.5}}, "no class 'lorry'"),
    "an unknown class of an event": (lambda: {"events": [{"kind": "count", "at_least": 1, "classes": ["x"]}]}, "'x'"),
    "tracks without tracking": (lambda: {"events": [{"kind": "enter"}]}, "tracking: true"),
    "an unknown kind": (lambda: {"events": [{"kind": "arrive"}]}, "events[0].kind"),
    "a dwell without seconds": (lambda: {"tracking": True, "events": [{"kind": "dwell"}]}, "dwell needs `seconds`"),
    "a zone in both": (lambda: {"zones": {"x": [[0, 0], [1, 0], [1, 1]]}, "include": ["x"], "exclude": ["x"]}, "'x'"),
    "two of one name": (lambda: {"tracking": True, "events": [{"kind": "enter"}, {"kind": "enter"}]}, "name"),
    "hysteresis": (lambda: {"tracking": True, "events": [{"kind": "enter", "frames": "1 of 5"}]}, "frames"),
    "areas": (lambda: {"min_area": 0.5, "max_area": 0.1}, "min_area"),
    "a line of no length": (lambda: {"lines": {"x": [[0.5, 0.5], [0.5, 0.505]]}}, "no length"),
    "a line of three points": (lambda: {"lines": {"x": [[0, 0], [1, 1], [1, 0]]}}, "two points"),
    "a line outside": (lambda: {"lines": {"x": [[0, 0], [1, 1.5]]}}, "outside the frame"),
    "an unknown line": (lambda: {"tracking": True, "events": [{"kind": "cross", "line": "x"}]}, "no line 'x'"),
    "a crossing without a line": (lambda: {"tracking": True, "events": [{"kind": "cross"}]}, "cross needs `line`"),
    "a direction of no line": (
        lambda: {"tracking": True, "events": [{"kind": "enter", "direction": "left"}]},
        "way across a line",
    ),
    "towards nowhere": (
        lambda: {"tracking": True, "events": [{"kind": "heading", "towards": [0, 0]}]},
        "points nowhere",
    ),
    "a key": (lambda: {"track": True}, "did you mean tracking"),
    "labels of boxes": (lambda: {"events": [{"kind": "label-changes"}]}, "one label a frame"),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_bad_rules_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    make, part = BAD_RULES[name]
    config = write_spot_box(tmp_path, [4], {"spot": make()})
    with pytest.raises(InputError) as caught:
        run(config, check=True)
    text = str(caught.value)
    assert part in text and "\n" not in text and str(config) in text


@pytest.mark.parametrize(
    ("rules", "part"),
    [
        ({"kind": {"one_box": True}}, "has no boxes"),
        ({"gone": {"motion_gating": True}}, "no such query"),
        ({"kind": {"tracking": True}}, "has no boxes"),
    ],
)
def test_rules_that_do_not_fit_the_bundle_are_refused(tmp_path: Path, rules, part) -> None:
    with pytest.raises(InputError, match=part):
        run(write_spot_box(tmp_path, [4], rules), check=True)


def test_tracking_of_a_query_with_too_few_frames_is_refused(tmp_path: Path) -> None:
    cameras = {"left": {"source": "clip", "fps": 1}}
    with pytest.raises(InputError, match="tracking: it needs 2 frames a second, and the query gets 1"):
        run(write_spot_box(tmp_path, [4], {"spot": {"tracking": True}}, cameras=cameras), check=True)


def test_tracking_pauses_while_too_few_frames_come_and_goes_on_after(tmp_path: Path) -> None:
    config = load_config(write_spot_box(tmp_path, [4], {"spot": ENTER}))
    sent: list[dict[str, Any]] = []
    stage = EventStage("run", lambda message: sent.append(dict(message.record)))
    queries = {query.id: query for query in load_box(config).bundle.queries}
    stage.change(queries, config.rules, {"spot": 5.0})
    at = 0.0
    for step_s, count in ((0.2, 20), (2.0, 12), (0.2, 20)):
        for _ in range(count):
            at += step_s
            seen = [{"class": "car", "score": 0.9, "box": [20.0, 14.0, 24.0, 18.0]}]
            record = {"query": "spot", "frame": round(10 * at), "captured_at": 1000 + at, "detections": seen}
            stage.apply(ResultMessage(record, np.zeros((SIDE, SIDE, 3), np.uint8), at))
        trouble = stage.states()["spot"].tracking_trouble
        assert (trouble is not None) is (step_s == 2.0)
    assert [(one["type"], one["after"]["end_reason"]) for one in sent] == [
        ("new", None),
        ("end", "few-frames"),
        ("new", None),
    ]


def test_motion_gating_of_a_push_camera_is_refused(tmp_path: Path) -> None:
    config = load_config(write_spot_box(tmp_path, [4], {"spot": {"motion_gating": True}}))
    queries = load_box(config).bundle.queries
    with pytest.raises(InputError, match="motion_gating: each frame of the push camera left is answered"):
        check_rules(config.path, config.rules, queries, {"left"}, {"spot": 5.0})
