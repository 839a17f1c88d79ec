"""`adaptive` against `gemel` on drawn workloads, and on two that broke earlier schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.schedule.cases import arrivals_of, case_of
from benchmarks.schedule.drawn import MODELS, QUERIES, draw_workload, write_drawn
from benchmarks.schedule.promise import BOTH, HEADS, broken_cases, play, promise_rows, shares
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import coalesce_tensors, memory_settings
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.models.workload import load_workload
from tests.parameters import every

FOUND = {
    "orin-nano-8gb": [
        *(("ssd300_vgg16", "detection", 300, *asked) for asked in
          ((10, 100, 10), (2, 500, 10), (2, 100, 15), (10, 200, 5), (5, 100, 15))),
        ("googlenet", "classification", 224, 5, 100, 10),
    ],
    "jetson-nano": [
        (model, "classification", 224, *asked) for model, *asked in
        (("mobilenet_v2", 2, 100, 15), ("googlenet", 10, 500, 15), ("efficientnet_b0", 5, 100, 10),
         ("mobilenet_v2", 5, 100, 30), ("mobilenet_v2", 2, 100, 5), ("mobilenet_v2", 10, 100, 15))
    ],
}  # fmt: skip
"""By device: model, task, pixels, frames a second, SLA in ms, the camera's frames a second."""


def play_case(path: Path, device: str, seconds: float) -> dict[str, object]:
    case = case_of(path, device)
    costs, arrivals = coalesce_tensors(case.shared), arrivals_of(case.demands, seconds, 0)
    budget = memory_settings(case.apart)["min"]
    return {
        name: [row["processed"] for row in simulate(costs, arrivals, budget, POLICIES[name], case.demands).per_query()]
        for name in BOTH
    }


@pytest.mark.parametrize("device", sorted(FOUND))
def test_adaptive_hard_workload_keeps_the_floors(device, tmp_path):
    cameras = {f"c{place}": {"source": "c.mp4", "fps": one[-1]} for place, one in enumerate(FOUND[device])}
    queries = [
        {"id": f"q{place}", "camera": f"c{place}", "model": model, "task": task, "classes": ["car", "van"],
         "input_size": size, "fps": fps, "sla_ms": sla_ms}
        for place, (model, task, size, fps, sla_ms, _) in enumerate(FOUND[device])
    ]  # fmt: skip
    path = tmp_path / "found.yaml"
    path.write_text(json.dumps({"name": "found", "accuracy_target": 0.95, "cameras": cameras, "queries": queries}))
    row = play_case(path, device, 60.0)
    assert not broken_cases([row]), shares(row)


@pytest.mark.slow
@pytest.mark.parametrize("number", every([4, 116, 144], [4]))
def test_adaptive_drawn_workload_keeps_the_floors(number, tmp_path):
    row = play_case(write_drawn(tmp_path, 1, number), "orin-nano-8gb", 60.0)
    assert not broken_cases([row]), shares(row)


def test_drawn_same_seed_gives_the_same_workload(tmp_path):
    kinds = {f"m{index}": "classification" for index in range(9)}
    some = [draw_workload(7, number, kinds) for number in range(40)]
    assert some == [draw_workload(7, number, kinds) for number in range(40)] and some[0] != draw_workload(8, 0, kinds)
    for one in some:
        assert QUERIES[0] <= len(one["queries"]) <= QUERIES[1]
        assert MODELS[0] <= len({query["model"] for query in one["queries"]}) <= MODELS[1]
    assert len(load_workload(write_drawn(tmp_path, 7, 0)).queries) >= QUERIES[0]


def test_broken_too_few_frames_in_sum_or_of_a_query():
    row = {"seed": 0, "device": "t4", "memory": "min", "received": 300, "gemel": [100, 20], "adaptive": [119, 16]}
    assert not broken_cases([row])
    assert broken_cases([{**row, "adaptive": [119, 15]}]) and broken_cases([{**row, "adaptive": [97, 20]}])
    reached = {**row, "memory": "50%", "adaptive": [100, 20]}
    found = dict(zip(HEADS, promise_rows([row, reached, {**row, "memory": "75%"}])[-1], strict=True))
    assert (found["cases"], found["more / as many / fewer"], found["sum kept"]) == (3, "2 / 1 / 0", "100.0 %")


def test_play_recorded_seeds_are_not_played_again(tmp_path, monkeypatch):
    file, played_seeds = tmp_path / "cases.json", []

    def play_one(seed, seconds):
        played_seeds.append(seed)
        return iter([{"seed": seed, "memory": "min"}])

    monkeypatch.setattr("benchmarks.schedule.promise._play_workload", play_one)
    assert len(play(3, 4, 60.0, file, limit_s=-1.0)) == 0
    assert [row["seed"] for row in play(3, 2, 60.0, file)] == [3, 4]
    assert [row["seed"] for row in play(3, 4, 60.0, file)] == [3, 4, 5, 6] and played_seeds == [3, 4, 5, 6]
