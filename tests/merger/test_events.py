"""Events of the stages of long work, and when they are reported."""

from __future__ import annotations

from typing import Any

import pytest

from merger.events import Stages


class Recorder:
    """Events and a clock that goes on by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def clock(self) -> float:
        return self.now

    def parts(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == "part"]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def stages(recorder: Recorder) -> Stages:
    return Stages(recorder, recorder.clock)


def test_stages_are_told_beforehand_and_then_one_by_one(stages: Stages, recorder: Recorder) -> None:
    stages.announce(("read", "train"))
    stages.begin("read")
    stages.add()
    stages.begin("train", 2)
    assert recorder.events == [
        ("stages", {"names": ["read", "train"]}),
        ("stage", {"name": "read"}),
        ("stage", {"name": "train"}),
    ]


def test_a_part_tells_how_long_the_rest_takes(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 4)
    recorder.now = 30.0
    stages.add()
    recorder.now = 60.0
    stages.reach(3)
    assert recorder.parts() == [{"done": 0.25, "seconds_left": 90.0}, {"done": 0.75, "seconds_left": 20.0}]


def test_parts_are_told_once_a_second_and_with_a_time_from_two_percent_on(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 1000)
    for _ in range(100):
        recorder.now += 0.125
        stages.add()
    assert len(recorder.parts()) == 12
    assert recorder.parts()[0] == {"done": 0.008, "seconds_left": None}
    assert recorder.parts()[-1]["seconds_left"] == pytest.approx(12 * 904 / 96)


def test_the_part_done_never_falls_nor_passes_the_whole(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 10)
    for amount in (5, 3, 12):
        recorder.now += 1.0
        stages.reach(amount)
    assert [part["done"] for part in recorder.parts()] == [0.5, 0.5, 1.0]
    stages.begin("mend", 10)
    recorder.now += 1.0
    stages.add()
    assert recorder.parts()[-1]["done"] == 0.1
