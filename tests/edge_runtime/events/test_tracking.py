"""Numbers of objects: from their second frame on, through gaps, each once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemel.edge_runtime.events.rules import QueryKeys
from gemel.edge_runtime.events.stage import EventStage
from gemel.edge_runtime.events.tracking import ObjectTracker, unite_boxes
from gemel.edge_runtime.frames.queues import Frame, Ledger
from gemel.edge_runtime.frames.results import Publisher, RunIdentity
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.predictions import DetectionPrediction
from tests.edge_runtime.tiny import query

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


def test_weak_detection_continues_a_track_where_it_overlaps_and_no_strong_one_does() -> None:
    tracker, weak = ObjectTracker(FPS), box_at(12.0, score=0.15)
    assert follow(tracker, [[box_at(10.0)]] * 2)[-1] == [1]
    assert tracker.update([], 0.4, [weak, box_at(300.0, score=0.15)]) == [1, None]
    assert tracker.update([box_at(60.0)], 0.6, [weak]) == [1, None], "a strong one near by is surer"
    assert tracker.update([], 0.8, [box_at(140.0, score=0.15)]) == [None], "distance alone is not enough"


def test_boxes_of_one_object_are_the_strong_one_where_a_weak_one_overlaps() -> None:
    strong, weak = box_at(10.0, score=0.4), box_at(12.0, score=0.6)
    assert unite_boxes([strong], 0.6, [weak, box_at(300.0, score=0.15)]) == [strong, box_at(300.0, score=0.15)]


def test_weak_detections_hold_an_event_open_and_are_in_no_result() -> None:
    sent: list[ResultMessage] = []
    stage = EventStage("run", sent.append)
    keys = {"tracking": True, "min_score": 0.5, "events": [{"kind": "enter", "frames": "1 of 1"}]}
    watched = query("spot", "left", task="detection", classes=("car",), min_score=0.3)
    stage.change({"spot": watched}, {"spot": QueryKeys.model_validate(keys).to_rules()}, {"spot": FPS})
    image = np.zeros((200, 400, 3), np.uint8)

    def see(frame: int, strong: list[dict[str, Any]], weak: list[dict[str, Any]]) -> list[Any]:
        head = {"run": "run", "query": "spot", "camera": "left", "frame": frame, "captured_at": 100 + frame / FPS}
        named = [[{**one, "class": "car"} for one in part] for part in (strong, weak)]
        message = ResultMessage({**head, "detections": named[0]}, image, frame / FPS, named[1])
        return list(stage.apply(message).record["detections"])

    assert all(see(frame, [box_at(100.0)], []) for frame in range(3))
    for frame in range(3, 30):
        faint = [box_at(100.0, score=0.4)] if frame % 2 else []
        assert see(frame, faint, [] if faint else [box_at(100.0, score=0.2)]) == []
    assert [message.record["type"] for message in sent] == ["new"], "it goes on for longer than an object may be unseen"
    for frame in range(30, 45):
        see(frame, [], [box_at(300.0, score=0.2)])
    assert [message.record["type"] for message in sent] == ["new", "end"]


@pytest.mark.parametrize("keys", [{"min_score": 0.3}, {"threshold": 0.3}, {}], ids=["asked", "chosen", "neither"])
def test_publisher_gives_no_sink_what_is_below_the_least_score(keys: dict[str, float]) -> None:
    sent: list[ResultMessage] = []
    ledger = Ledger(["spot"])
    watched = query("spot", "left", task="detection", classes=("car",), **keys)
    publisher = Publisher(sent.append, ledger, {"spot": watched}, RunIdentity("0" * 64))
    found = DetectionPrediction(("car", "car"), (0.9, 0.2), ((0.0, 0.0, 9.0, 9.0), (50.0, 0.0, 59.0, 9.0)))
    ledger.count_received("spot")
    publisher.publish("spot", [Frame(0, 0.0)], [found], 0.1)
    assert [one["score"] for one in sent[0].record["detections"]] == [0.9]
    assert [one["score"] for one in sent[0].weak] == [0.2]
