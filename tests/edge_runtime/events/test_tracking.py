"""Numbers of objects: from their second frame on, through gaps, each once."""

from __future__ import annotations

from typing import Any

from gemel.edge_runtime.events.tracking import ObjectTracker, unite_boxes

FPS = 5.0


def box_at(x: float, score: float = 0.9) -> dict[str, Any]:
    return {"box": (x, 100.0, x + 60, 160.0), "score": score}


def follow(tracker: ObjectTracker, frames: list[list[dict[str, Any]]], start: float = 0.0) -> list[list[int | None]]:
    return [tracker.update(seen, start + index / FPS) for index, seen in enumerate(frames)]


def test_objects_have_their_number_from_the_second_frame_on() -> None:
    frames = [[box_at(10 + 4 * step), box_at(300 - 4 * step)] for step in range(5)]
    first, *others = follow(ObjectTracker(FPS), frames)
    assert first == [None, None] and all(found == [1, 2] for found in others)


def test_object_keeps_its_number_through_a_gap_and_loses_it_after_a_longer_one() -> None:
    short, long = [[] for _ in range(8)], [[] for _ in range(11)]
    there = [[box_at(10.0)]] * 3
    assert follow(ObjectTracker(FPS), [*there, *short, *there])[-1] == [1]
    assert follow(ObjectTracker(FPS), [*there, *long, *there])[-1] == [2]


def test_uncertain_detection_continues_a_track_and_begins_none() -> None:
    tracker = ObjectTracker(FPS, certain_score=0.5)
    certain, faint = [box_at(10.0)], [box_at(10.0, score=0.2)]
    assert follow(tracker, [certain, certain, faint, faint]) == [[None], [1], [1], [1]]
    assert follow(tracker, [[box_at(300.0, score=0.2)]] * 3, start=1.0) == [[None]] * 3


def test_numbers_never_repeat_after_a_reset() -> None:
    tracker = ObjectTracker(FPS)
    assert follow(tracker, [[box_at(10.0)]] * 2)[-1] == [1]
    tracker.reset()
    assert follow(tracker, [[box_at(10.0)]] * 2, start=1.0) == [[None], [2]]
    assert follow(tracker, [[]] * 20, start=2.0)[-1] == []


def walker(x: float, y: float = 100.0) -> dict[str, Any]:
    return {"box": (x, y, x + 16, y + 40), "score": 0.9}


def test_walkers_whose_boxes_do_not_overlap_keep_their_numbers() -> None:
    frames = [[walker(10 + 18 * step), walker(250 - 18 * step, 180.0)] for step in range(10)]
    assert all(numbers == [1, 2] for numbers in follow(ObjectTracker(FPS), frames)[1:])


def test_object_hidden_while_it_moves_is_expected_further_on() -> None:
    frames = [[walker(10 + 12 * step)] if step not in (4, 5, 6, 7) else [] for step in range(11)]
    assert follow(ObjectTracker(FPS), frames)[-1] == [1]


def test_box_far_larger_than_an_object_is_another_object() -> None:
    small, large = [walker(100.0)], [{"box": (60.0, 40.0, 160.0, 290.0), "score": 0.9}]
    assert follow(ObjectTracker(FPS), [small, small, large, large]) == [[None], [1], [None], [2]]


def test_boxes_of_one_object_in_three_classes_become_the_best_of_them() -> None:
    bus = {"class": "bus", "score": 0.7, "box": (10, 10, 110, 60)}
    truck = {"class": "truck", "score": 0.5, "box": (12, 8, 112, 60)}
    car = {"class": "car", "score": 0.8, "box": (100, 20, 140, 60)}
    assert unite_boxes([truck, bus, car], 0.6) == [bus, car]
    assert unite_boxes([], 0.6) == []
