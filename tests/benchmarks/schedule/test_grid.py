"""Accuracy over time by hand, the floor, and the grid's arms on paper."""

from __future__ import annotations

import pytest

from benchmarks.schedule import grid, objective
from benchmarks.schedule.grid import narrowed, within
from benchmarks.schedule.objective import accuracy_over_time, at_rate, below, curves
from edge_runtime.policies import POLICIES
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from edge_runtime.simulation.simulator import simulate

BIG, SMALL = 400_000, 1000


def one(run_s: float = 0.05) -> Costs:
    cost = QueryCost(("big", "small"), run_s, 7, 1.0, (BatchCost(2, 2 * run_s, 9),))
    return Costs({"q": cost}, {"big": BIG, "small": SMALL}, 1e9)


def test_at_each_frames_moment_the_newest_finished_answer_counts_by_its_age():
    demands, worth = {"q": QuerySpec(10.0)}, {"q": (1.0, 0.8, 0.5)}
    frames = {"q": [index / 10 for index in range(11)]}
    played = simulate(one(), frames, 2 * BIG, POLICIES["gemel"], demands)
    (found,) = accuracy_over_time(played, demands, worth)
    assert found == pytest.approx(10 * 0.8 / 11), "none at the first moment, then always the frame before"


def test_a_curve_at_another_rate_says_the_same_of_the_same_seconds():
    assert at_rate((1.0, 0.8, 0.6), 5.0, 10.0) == pytest.approx((1.0, 0.9, 0.8, 0.7, 0.6))
    assert at_rate((1.0, 0.8, 0.6), 5.0, 2.5) == pytest.approx((1.0, 0.6))


def test_the_recorded_curves_fall_from_one():
    for _, curve in curves().values():
        assert curve[0] == 1.0 and list(curve) == sorted(curve, reverse=True)


def row(own: float, mine: float) -> dict:
    arms = {arm: {"accuracy": [0.5, mine]} for arm in objective.ARMS}
    arms[objective.APART] = arms[objective.OTHERWISE] = {"accuracy": [0.5, own]}
    return {"workload": "w", "device": "d", "memory": "min", "queries": ["a", "b"], "arms": arms}


def test_a_query_below_its_original_is_named_and_counted():
    assert below(row(0.5, 0.4), objective.FRAMES) == [(pytest.approx(-0.1), "b")]
    assert below(row(0.5, 0.496), objective.FRAMES) == []
    (line, _) = objective.table([row(0.5, 0.4)])
    assert dict(zip(objective.HEADS, line, strict=True))["queries below the floor"] == "1 / 1 / 1"


def test_four_bits_are_an_eighth_of_large_tensors_and_are_widened_to_run():
    costs = narrowed(one())
    assert costs.tensor_bytes == {"big": BIG // 8, "small": SMALL}
    assert costs.queries["q"].workspace_bytes == 7 + BIG * 5 // 4 and costs.queries["q"].workspace_of(2) > BIG


def test_one_sla_holds_for_all():
    assert within(one(), 50).queries["q"].sla_s == 0.05 and one().queries["q"].sla_s == 1.0


def test_the_grids_table_says_what_each_arm_brings_by_one_thing_at_a_time():
    arms = {arm: {"in_time": 5, "accuracy": 0.5} for arm in grid.ARMS}
    rows = [
        {"workload": "one", "memory": memory, "fps": fps, "sla_ms": 50, "received": 10 * fps, "arms": arms}
        for memory in ("min", "all") for fps in (5, 10)
    ]  # fmt: skip
    found = {line[0]: line[1] for line in grid.table(rows)}
    assert found["memory min"] == "8 / 0.500" and found["fps 5"] == "10 / 0.500" and found["fps 10"] == "5 / 0.500"
    assert found["everything"] == "8 / 0.500" and "fps 30" not in found
    other = [{**row, "workload": "other", "fps": 10, "received": 100} for row in rows]
    found = {line[0]: line[1] for line in grid.by_workload([*rows, *other])}
    assert found == {
        "one, min": "8 / 0.500",
        "one, all": "8 / 0.500",
        "other, min": "5 / 0.500",
        "other, all": "5 / 0.500",
    }


def test_a_bad_record_ends_both_commands_with_2(tmp_path, capsys):
    (tmp_path / "played.json").write_text("[]")
    for command in (grid.main, objective.main):
        assert command(["--json", str(tmp_path / "played.json")]) == 2
        assert "is no record" in capsys.readouterr().err
