"""Events of the stages of long work, and when they are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemel.merger.context import MergeContext
from gemel.models.stages import Stages
from gemel.models.workload import load_workload
from tests.edge_runtime.tiny import write_folder
from tests.merger.tiny import write_random_weights, write_workload


class Recorder:
    """Events and a clock that goes on by hand."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, list[tuple[str, dict[str, Any]]]()

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def parts(self) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == "part"]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def stages(recorder: Recorder) -> Stages:
    return Stages(recorder, lambda: recorder.now)


def test_stages_are_announced_then_begun(stages: Stages, recorder: Recorder) -> None:
    stages.announce(("read", "train"))
    stages.begin("read")
    stages.add()
    stages.begin("train", 2)
    assert recorder.events == [
        ("stages", {"names": ["read", "train"]}),
        ("stage", {"name": "read"}),
        ("stage", {"name": "train"}),
    ]


def test_part_estimates_the_seconds_left(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 4)
    recorder.now = 30.0
    stages.add()
    recorder.now = 60.0
    stages.reach(3)
    assert recorder.parts() == [{"done": 0.25, "seconds_left": 90.0}, {"done": 0.75, "seconds_left": 20.0}]


def test_parts_come_once_a_second_with_time_from_two_percent(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 1000)
    for _ in range(100):
        recorder.now += 0.125
        stages.add()
    assert len(recorder.parts()) == 12
    assert recorder.parts()[0] == {"done": 0.008, "seconds_left": None}
    assert recorder.parts()[-1]["seconds_left"] == pytest.approx(12 * 904 / 96)


def test_part_never_falls_nor_exceeds_the_whole(stages: Stages, recorder: Recorder) -> None:
    stages.begin("train", 10)
    for amount in (5, 3, 12):
        recorder.now += 1.0
        stages.reach(amount)
    assert [part["done"] for part in recorder.parts()] == [0.5, 0.5, 1.0]
    stages.begin("mend", 10)
    recorder.now += 1.0
    stages.add()
    assert recorder.parts()[-1]["done"] == 0.1


@pytest.mark.parametrize("keys", [{}, {"data": "frames"}])
def test_open_counts_each_frame_that_an_original_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    write_random_weights(path := write_workload(tmp_path, queries=1, frames=0 if keys else 60, **keys))
    write_folder(tmp_path / "frames", 200)
    ctx, added = MergeContext(load_workload(path)), list[int]()
    ctx.proves = True
    monkeypatch.setattr(ctx.stages, "add", added.append)
    ctx.open()
    judged = len(ctx.val["q0"]) + len(ctx.search["q0"])
    assert sum(added) == judged + len(ctx.data.footage_answers["q0"])
    assert sum(added) <= ctx.data.count_frames("q0", proves=True) <= judged + len(ctx.val["q0"])
    assert (ctx.data.count_frames("q0", proves=True) > judged) == bool(keys), "val without labels is footage, too"
