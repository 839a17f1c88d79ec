"""What became of each set: a pure function of the sets, the log and the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.merger import METHODS, merge
from gemel.merger.events import Change
from gemel.merger.outcomes import (
    NOTHING,
    Obstacle,
    SetTrial,
    explain_attempts,
    explain_steps,
    outcome_rows,
)
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Workload
from tests.merger.options import QUICK

A, B, C = ("a", "x"), ("b", "x"), ("c", "x")
SIZE = {(query, path): 100 if path == "x" else 40 for query in "abc" for path in "xy"}
REQUIRED = dict.fromkeys("abc", 0.95)


def row_of(trial: SetTrial, *shared: Any) -> dict[str, Any]:
    """The row of one trial under a plan."""
    return dict(outcome_rows([trial], SharingPlan(tuple(shared)), SIZE)[0])


def test_set_that_all_share_is_kept() -> None:
    row = row_of(SetTrial((A, B, C), {"a": Obstacle("x", 0.9, 0.95)}, 5.0, 2), (A, B, C))
    assert row["outcome"] == "kept" and row["saved_bytes"] == 200 and row["in_the_way"] == {} and row["together"] == 2


def test_set_that_some_share_is_partly_kept_with_its_obstacle() -> None:
    row = row_of(SetTrial((A, B, C), {"c": Obstacle("repair", 0.9, 0.95)}), (A, B))
    assert row["outcome"] == "partly" and row["saved_bytes"] == 100
    assert row["in_the_way"] == {"c": {"after": "repair", "ratio": 0.9, "required": 0.95}}


def test_set_that_no_query_shares_is_refused_if_tried() -> None:
    assert row_of(SetTrial((A, B)))["outcome"] == "refused"
    assert row_of(SetTrial((A, B), tried=False))["outcome"] == "untried"


@pytest.mark.parametrize(
    ("rows", "after", "ratio"),
    [
        ([], NOTHING, None),
        ([{"step": Change.NETWORK.value, "query": "c", "ratio": 0.8, "required": 0.95}], NOTHING, None),
        ([{"step": Change.LAYERS.value, "query": "c", "ratio": 0.8, "required": 0.95}], Change.LAYERS.value, 0.8),
    ],
)
def test_obstacle_is_the_last_step_on_layers(rows: list, after: str, ratio: float | None) -> None:
    (trial,) = explain_steps([(B, C)], rows, REQUIRED, 7.0)
    assert trial.in_the_way["c"] == Obstacle(after, ratio, 0.95) and trial.tried == (ratio is not None)


def test_attempts_name_the_queries_that_were_lost() -> None:
    rows = [
        {"members": [A, B, C], "kept": [], "ratios": {"a": 0.9, "b": 0.99, "c": 0.5}, "diverged": False,
         "flops_spent": 3.0},
        {"members": [A, B], "kept": [A, B], "ratios": {"a": 0.96, "b": 0.97}, "diverged": False, "flops_spent": 2.0},
    ]  # fmt: skip
    first, second = explain_attempts([(A, B, C), (("a", "y"), ("b", "y"))], rows, REQUIRED)
    assert first.in_the_way == {"c": Obstacle("attempt 1 of 2", 0.5, 0.95)} and first.flops == 5.0
    assert not second.tried


@given(st.lists(st.lists(st.sampled_from([A, B, C]), unique=True, max_size=3), max_size=1))
@settings(max_examples=25, deadline=None)
def test_rows_save_what_the_plan_saves(sets: list) -> None:
    plan = SharingPlan()
    for members in sets:
        plan = plan.with_set(members)
    row = outcome_rows([SetTrial((A, B, C))], plan, SIZE)[0]
    assert row["saved_bytes"] == sum(100 * (len(members) - 1) for members in plan.shared)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in METHODS.added])
def test_every_method_accounts_for_its_sets(workload: Workload, tmp_path: Path, method: str) -> None:
    out = tmp_path / "b.safetensors"
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=1, frames_per_epoch=32), margin=1.0)
    report = merge(workload, out, method, options=options)
    rows = [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]
    sets = [row for row in rows if "set" in row]
    saved = sum(row["saved_bytes"] for row in sets)
    assert saved <= report.bytes_before - report.bytes_after <= saved + 2000 * len(report.queries)
    assert bool(sets) == METHODS[method].searches and rows[len(rows) - len(sets) :] == sets
    for row in sets:
        missing = {query for query, _ in row["set"]} - {query for query, _ in row["kept"]}
        assert row["in_the_way"].keys() <= missing
