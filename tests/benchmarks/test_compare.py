"""What `make compare` counts: frames in time on a clock of work, reloads of a cache, and its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.compare import child, tables
from benchmarks.compare.child import Pictures, draw_requests, play, replay
from benchmarks.compare.compare import WAYS, WORKLOADS


class SteadyWay:
    """A way whose runs and loads take a given time of its own clock."""

    def __init__(self, run_s: float, load_s: float = 0.0) -> None:
        self.run_s, self.load_s, self.now, self.loads = run_s, load_s, 0.0, 0

    def open(self, model: str) -> str:
        self.now, self.loads = self.now + self.load_s, self.loads + 1
        return model

    def run(self, opened: str, picture: np.ndarray, inputs: Pictures) -> list[np.ndarray]:
        self.now += self.run_s
        return []


@pytest.fixture(autouse=True)
def _use_the_clock_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "clock", lambda way: way.now)


def pictures() -> Pictures:
    return Pictures(np.full((2, 3, 4, 4), 100, np.uint8), np.zeros(3, np.float32), np.ones(3, np.float32), True)


@pytest.mark.parametrize(("run_s", "least", "most"), [(0.01, 1.0, 1.0), (0.05, 0.45, 0.6), (0.5, 0.0, 0.1)])
def test_frames_in_time_follow_the_load(run_s: float, least: float, most: float) -> None:
    models = {name: name for name in "abcd"}  # 40 frames a second in all: 0.025 s each
    part = play(SteadyWay(run_s), models, dict.fromkeys(models, pictures()), 10, 3)
    assert least <= part <= most


def test_pictures_are_prepared_as_the_model_takes_them() -> None:
    mean, std = np.array([10, 20, 30], np.float32), np.array([1, 2, 4], np.float32)
    picture = np.arange(3, dtype=np.uint8).reshape(3, 1, 1) * 50
    prepared = Pictures(picture[None], mean, std, True).prepare(picture)
    assert prepared.shape == (1, 3, 1, 1) and prepared.ravel().tolist() == [90.0, 15.0, -7.5]  # blue first


@pytest.mark.parametrize(("limit_mb", "room"), [(75, 7), (1e9, 12)])
def test_replay_reloads_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, limit_mb: float, room: int) -> None:
    way = SteadyWay(0.01, load_s=0.05)
    names = [f"v{number:02}" for number in range(12)]
    monkeypatch.setattr(child, "read_pictures", lambda path: pictures())
    monkeypatch.setattr(child, "memory_of", lambda pids: {"pss_mb": 10.0 * way.loads, "anonymous_mb": 0.0})
    row: dict[str, Any] = replay(way, {"inputs": dict.fromkeys(names, ""), "limit_mb": limit_mb})
    assert row["room"] == room and (row["reloads"] > 200) == (room < 12) == (row["reloads"] > 0)
    assert row["p95_ms"] >= row["p50_ms"] >= 30


def test_requests_are_those_of_the_report_and_the_same_each_time() -> None:
    names = [f"v{number:02}" for number in range(12)]
    requests = draw_requests(names)
    assert requests == draw_requests(names) and len(requests) == 112
    assert {len(chain) for _, chain in requests} <= {3, 4, 5} and len({tuple(chain) for _, chain in requests}) == 6


def test_every_way_and_workload_has_a_name_in_the_tables() -> None:
    assert tables.NAMES.keys() == WAYS.keys() and tables.WORKLOADS.keys() == set(WORKLOADS)
    row = {"pss_mb": 1.0, "anonymous_mb": 1.0, "in_time": {"2": 1.0, "5": 0.5, "10": 0.1}, "ms_a_frame": 1.0,
           "agreement": {"a": 1.0, "b": 0.5}, "worst": 0.5, "made_s": 60.0, "files_mb": 2.0,
           "install_mb": 3.0}  # fmt: skip
    (cells,) = tables.compare_rows({"detectors": {"rows": {"sessions": row}}})
    assert len(cells) == len(tables.HEADS) and "75.0 %" in cells and "50.0 %" in cells
