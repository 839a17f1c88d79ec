"""Events begin and end as their rules say, for what frames show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.events.machine import EndReason, EventMachine, Latch, Moment, Notice, Sighting, see_object
from gemel.edge_runtime.events.rules import EventKind, EventRule, Hysteresis, QueryKeys

FPS = 5.0
FAST = Hysteresis(1, 1)
IN, OUT = ("lane",), ()
LANE = ((0.0, 0.0), (0.9, 0.0), (0.9, 1.0), (0.0, 1.0))


def make_machine(*rules: EventRule, lost_s: float = 1.5) -> EventMachine:
    ids = itertools.count(1)
    return EventMachine(rules, lost_s, FPS, {"query": "q"}, lambda: str(next(ids)))


def make_rule(kind: EventKind, **keys: Any) -> EventRule:
    return EventRule(str(kind), kind, **{"zone": None, "frames": FAST, **keys})


def car(
    zones: tuple[str, ...] = IN,
    track: int = 1,
    score: float = 0.5,
    label: str = "car",
    x: float = 10.0,
    y: float = 10.0,
) -> Sighting:
    box = [x, y, x + 10.0, y + 20.0]
    return see_object(track, {"class": label, "score": score, "box": box}, zones, (100, 100))


def play(machine: EventMachine, frames: Sequence[Sequence[Sighting]], step_s: float = 0.2) -> list[Notice]:
    """Frames five a second; the moment of frame n is n * step_s, and 1,000 s later in Unix seconds."""
    found = []
    for number, seen in enumerate(frames):
        found += machine.observe(Moment(number, number * step_s, 1000 + number * step_s, (100, 100)), seen)
    return found


def describe(notices: Sequence[Notice]) -> list[tuple[str, str, float, float | None]]:
    kinds = ["end" if one.is_end else "new" for one in notices]
    ends = [None if one.after["end_time"] is None else round(one.after["end_time"], 3) for one in notices]
    starts = [round(one.after["start_time"], 3) for one in notices]
    return [(one.rule.name, *rest) for one, rest in zip(notices, zip(kinds, starts, ends, strict=True), strict=True)]


@pytest.mark.parametrize(("fps", "frames"), [(1, (3, 5)), (5, (3, 5)), (10, (4, 6)), (25, (9, 15)), (500, (60, 100))])
def test_default_hysteresis_covers_a_time(fps: float, frames: tuple[int, int]) -> None:
    keys = QueryKeys.model_validate({"events": [{"kind": "count", "at_least": 2}]})
    (rule,) = keys.to_rules().events
    assert rule.at_rate(fps).frames == Hysteresis(*frames)
    own = QueryKeys.model_validate({"events": [{"kind": "count", "at_least": 2, "frames": "2 of 3"}]})
    assert own.to_rules().events[0].at_rate(fps).frames == Hysteresis(2, 3)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6), st.data())
def test_latch_changes_only_when_enough_of_the_window_says_so(values, window, data) -> None:
    count = data.draw(st.integers(window // 2 + 1, window))
    latch, before = Latch(Hysteresis(count, window)), False
    for end, value in enumerate(values, 1):
        changed = latch.add(value)
        seen = values[max(0, end - window) : end]
        assert changed is (latch.is_on is not before)
        assert latch.is_on is (seen.count(not before) >= count) ^ before
        before = latch.is_on


def test_enter_lasts_from_the_first_to_the_last_frame_in_the_zone() -> None:
    rule = make_rule(EventKind.ENTER, zone="lane", frames=Hysteresis(2, 3))
    frames = [[car(OUT)], [car()], [car()], [car()], [car(OUT)], [car(OUT)]]
    found = play(make_machine(rule), frames)
    assert describe(found) == [("enter", "new", 1000.2, None), ("enter", "end", 1000.2, 1000.6)]
    assert (found[1].after["end_reason"], found[1].before["end_time"]) == ("left", None)
    assert found[0].after["id"] == found[1].after["id"]
    assert [one.open for one in found] == [1, 0]


def test_enter_survives_one_frame_outside_within_its_hysteresis() -> None:
    rule = make_rule(EventKind.ENTER, zone="lane", frames=Hysteresis(3, 5))
    frames = [[car()]] * 4 + [[car(OUT)], [car()]] + [[car()]] * 3
    assert len(play(make_machine(rule), frames)) == 1


def test_event_ends_once_its_object_is_lost() -> None:
    frames = [[car()], [car()], *[[]] * 9]
    found = play(make_machine(make_rule(EventKind.ENTER), lost_s=1.5), frames)
    assert describe(found) == [("enter", "new", 1000.0, None), ("enter", "end", 1000.0, 1000.2)]
    assert found[1].after["end_reason"] == EndReason.LOST


def test_object_that_is_lost_within_its_zone_is_lost_and_does_not_leave() -> None:
    rules = [make_rule(kind, zone="lane", polygon=LANE) for kind in (EventKind.LEAVE, EventKind.LOST)]
    hidden = play(make_machine(*rules), [[car(x=40.0)], [car(x=40.0)], *[[]] * 9])
    assert describe(hidden) == [("lost", "new", 1000.2, None), ("lost", "end", 1000.2, 1000.2)]
    walks_out = [[car(x=40.0 + 8 * step)] for step in range(5)]
    assert {one.rule.kind for one in play(make_machine(*rules), [*walks_out, *[[]] * 9])} == {EventKind.LEAVE}
    cut_off = [[car(x=90.0)], [car(x=90.0)]]
    assert {one.rule.kind for one in play(make_machine(*rules), [*cut_off, *[[]] * 9])} == {EventKind.LEAVE}


def test_line_counts_each_way_once_and_not_what_passes_its_end() -> None:
    rule = make_rule(EventKind.CROSS, line="kerb", segment=((0.0, 0.5), (0.6, 0.5)))
    down, up = [[car(y=y)] for y in (10, 20, 40, 50)], [[car(track=2, y=y)] for y in (50, 40, 20, 10)]
    machine = make_machine(rule)
    notices = [
        *play(machine, down),
        *play(machine, up),
        *play(machine, [[car(track=3, x=80, y=y)] for y in (10, 40, 50)]),
    ]
    begun = [one.after for one in notices if not one.is_end]
    assert [(one["direction"], one["crossed"]) for one in begun] == [
        ("right", {"left": 0, "right": 1}),
        ("left", {"left": 1, "right": 1}),
    ]
    assert [one.is_end for one in notices] == [False, True] * 2


def test_line_ignores_an_object_that_jitters_over_it() -> None:
    rule = make_rule(EventKind.CROSS, line="kerb", segment=((0.0, 0.5), (1.0, 0.5)))
    assert play(make_machine(rule), [[car(y=28 + 4 * (step % 2))] for step in range(9)]) == []
    one_way = make_rule(EventKind.CROSS, line="kerb", segment=((0.0, 0.5), (1.0, 0.5)), direction="left")
    assert play(make_machine(one_way), [[car(y=y)] for y in (10, 40, 50)]) == []


def test_still_lasts_while_an_object_jitters_and_ends_as_it_moves_off() -> None:
    rule = make_rule(EventKind.STILL, seconds=0.6)
    frames = [[car(x=10.0 + 15 * step)] for step in range(3)] + [[car(x=40.0 + step % 2)] for step in range(6)]
    notices = play(make_machine(rule), [*frames, [car(x=60.0)], [car(x=75.0)]])
    assert [(one.is_end, one.after["end_reason"]) for one in notices] == [(False, None), (True, "moved")]
    assert notices[0].after["start_time"] == pytest.approx(1000.4, abs=0.21)


def test_heading_begins_for_objects_that_move_as_asked() -> None:
    rule = make_rule(EventKind.HEADING, towards=(-1.0, 0.0))
    leftwards = [[car(x=60.0 - 8 * step)] for step in range(5)]
    assert [one.after["kind"] for one in play(make_machine(rule), leftwards)] == ["heading"]
    assert play(make_machine(rule), [[car(x=10.0 + 8 * step)] for step in range(5)]) == []
    assert play(make_machine(rule), [[car(x=40.0 + step % 2)] for step in range(5)]) == []


def test_event_says_how_many_of_the_expected_frames_it_saw() -> None:
    thin = play(make_machine(make_rule(EventKind.ENTER, zone="lane")), [[car()]] * 4 + [[car(OUT)]], step_s=0.5)
    assert thin[-1].after["frames"] == {"seen": 4, "expected": 9}


def test_event_lasts_as_long_as_it_did_where_the_wall_clock_jumps() -> None:
    machine = make_machine(make_rule(EventKind.ENTER, zone="lane"))
    for frame, jump in enumerate((0, 0, 3600, 3600, -3600)):
        machine.observe(Moment(frame, 0.2 * frame, 1000 + 0.2 * frame + jump, (100, 100)), [car()])
    (notice,) = machine.end_all(EndReason.STOPPED)
    assert notice.after["duration_s"] == 0.8 and notice.after["end_time"] == pytest.approx(1000.8)


def test_leave_begins_and_ends_when_an_object_has_left() -> None:
    found = play(make_machine(make_rule(EventKind.LEAVE, zone="lane")), [[car()], [car()], [car(OUT)]])
    assert describe(found) == [("leave", "new", 1000.2, None), ("leave", "end", 1000.2, 1000.2)]


def test_dwell_begins_after_its_seconds_and_ends_when_the_object_leaves() -> None:
    rule = make_rule(EventKind.DWELL, zone="lane", seconds=0.5)
    found = play(make_machine(rule), [[car()]] * 5 + [[car(OUT)]])
    assert describe(found) == [("dwell", "new", 1000.0, None), ("dwell", "end", 1000.0, 1000.8)]
    assert play(make_machine(rule), [[car()]] * 3 + [[car(OUT)]]) == []


def test_dwell_goes_on_while_frames_are_held() -> None:
    machine = make_machine(make_rule(EventKind.DWELL, seconds=2.0))
    assert play(machine, [[car()]]) == []
    (notice,) = machine.hold(Moment(1, 2.0, 1002.0))
    assert notice.rule.kind is EventKind.DWELL
    assert machine.hold(Moment(2, 60.0, 1060.0)) == []


def test_count_lasts_while_enough_objects_are_in_the_zone() -> None:
    rule = make_rule(EventKind.COUNT, zone="lane", at_least=2)
    two, three = [car(track=1), car(track=2)], [car(track=1), car(track=2), car(track=3)]
    found = play(make_machine(rule), [[car()], two, three, [car(), car(OUT, 2)]])
    assert describe(found) == [("count", "new", 1000.2, None), ("count", "end", 1000.2, 1000.4)]
    assert (found[0].after["count"], found[1].after["top_count"]) == (2, 3)


def test_count_says_how_many_of_each_class_by_the_vote_of_tracks() -> None:
    machine = make_machine(make_rule(EventKind.COUNT, at_least=2))
    bus = car(track=2, label="bus", score=0.9)
    mistaken = car(track=2, label="car", score=0.4)
    play(machine, [[car(), bus], [car(), mistaken, car(track=3)]])
    (event,) = machine.open_events
    assert event["counts"] == {"car": 2, "bus": 1}


def test_classes_limit_a_rule_to_the_label_that_a_track_mostly_has() -> None:
    rule = make_rule(EventKind.ENTER, classes=frozenset({"bus"}))
    assert play(make_machine(rule), [[car()], [car(label="bus", score=0.1)]]) == []
    assert len(play(make_machine(rule), [[car(label="bus")]])) == 1


def test_label_changes_begins_with_the_new_label_and_ends_with_the_next() -> None:
    rule = make_rule(EventKind.LABEL_CHANGES, frames=Hysteresis(2, 3))
    labels = ["open", "open", "shut", "open", "shut", "shut", "open", "open"]
    found = play(make_machine(rule), [[Sighting(None, label, 0.9)] for label in labels])
    assert [(one.is_end, one.after["label"], one.after["previous_label"]) for one in found] == [
        (False, "shut", "open"),
        (True, "shut", "open"),
        (False, "open", "shut"),
    ]


def test_snapshot_is_of_the_frame_with_the_best_score() -> None:
    machine, pictures = make_machine(make_rule(EventKind.ENTER, zone="lane")), ["first", "second", "third"]
    for number, score in enumerate((0.3, 0.9, 0.5)):
        machine.observe(Moment(number, 0.2 * number, 0.2 * number, (100, 100), pictures[number]), [car(score=score)])
    (notice,) = machine.end_all(EndReason.STOPPED)
    assert (notice.image, notice.after["snapshot"]["frame"], notice.after["top_score"]) == ("second", 1, 0.9)
    assert (notice.after["end_reason"], notice.after["end_time"]) == ("stopped", 0.4)


def test_snapshot_with_a_picture_is_not_replaced_by_one_without() -> None:
    machine = make_machine(make_rule(EventKind.ENTER, zone="lane"))
    for number, (score, picture) in enumerate([(0.5, "first"), (0.9, None)]):
        machine.observe(Moment(number, 0.2 * number, 0.2 * number, (100, 100), picture), [car(score=score)])
    (notice,) = machine.end_all(EndReason.STOPPED)
    assert (notice.image, notice.after["snapshot"]["frame"], notice.after["top_score"]) == ("first", 0, 0.9)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=4, unique_by=lambda one: one[0]), max_size=40
    )
)
def test_every_event_begins_once_and_ends_once_in_order(frames) -> None:
    rules = [
        make_rule(EventKind.ENTER, zone="lane", frames=Hysteresis(2, 3)), make_rule(EventKind.LEAVE, zone="lane"),
        make_rule(EventKind.DWELL, seconds=0.5), make_rule(EventKind.COUNT, zone="lane", at_least=2),
    ]  # fmt: skip
    machine = make_machine(*rules, lost_s=0.5)
    found = play(machine, [[car(IN if inside else OUT, track) for track, inside in seen] for seen in frames])
    found += machine.end_all(EndReason.STOPPED)
    begun, ended = dict[str, float](), set[str]()
    for notice in found:
        event = notice.after
        if notice.is_end:
            assert event["id"] in begun and event["id"] not in ended
            assert event["end_time"] >= event["start_time"]
            ended.add(event["id"])
        else:
            assert event["id"] not in begun
            begun[event["id"]] = event["start_time"]
    assert ended == begun.keys() and machine.open_events == []
