"""What became of every set that a merge tried: from its sets, its log and the plan it ended with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merger import METHODS, merge
from merger.core.method import TRIALS
from merger.outcomes import NO_TIME, OUTCOMES, Trial, all_at_once, one_by_one, outcomes_of, prefixes
from models.bundle import open_bundle
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.options import QUICK

A, B, C = ("a", "conv"), ("b", "conv"), ("c", "conv")
D, E = ("a", "fc"), ("b", "fc")
SIZE = {A: 100, B: 100, C: 100, D: 1000, E: 1000}
REQUIRED = {"a": 0.95, "b": 0.95, "c": 0.95, "d": 0.95}
SPRINT = {"sprint": 1, "epoch": 1, "ratios": {"a": 0.99, "b": 0.98, "c": 0.7}, "met": ["a", "b"], "flops": 50.0}


def _repair(query: str, what: str, ratio: float | None = None, **keys: Any) -> dict[str, Any]:
    return {"query": query, "repair": what, "required": 0.95, "flops": 60.0} | (
        {"ratio": ratio} if ratio is not None else {}
    ) | keys  # fmt: skip


def _attempt(members: tuple, kept: tuple, ratios: dict[str, float], spent: float, diverged: bool = False) -> dict:
    return {
        "group": "conv", "members": [list(m) for m in members], "kept": [list(m) for m in kept], "ratios": ratios,
        "diverged": diverged, "flops_spent": spent,
    }  # fmt: skip


def test_a_set_that_all_share_is_kept() -> None:
    trials = all_at_once([(A, B, C), (D, E)], [SPRINT], REQUIRED, 99.0)
    whole, other = outcomes_of(trials, SharingPlan(((A, B, C), (D, E))), SIZE)
    assert (whole["outcome"], whole["saved_bytes"]) == ("kept", 200)
    assert (other["outcome"], other["saved_bytes"]) == ("kept", 1000)
    assert whole["in_the_way"] == other["in_the_way"] == {}
    assert (whole["flops"], whole["together"]) == (50.0, 2)


def test_a_set_whose_members_share_two_weights_in_the_end_counts_what_both_save() -> None:
    members = (A, B, C, ("d", "conv"))
    plan, size = SharingPlan(((A, C), (B, ("d", "conv")))), SIZE | {("d", "conv"): 100}
    (row,) = outcomes_of([Trial(members)], plan, size)
    assert (row["outcome"], row["kept"], row["saved_bytes"]) == ("partly", [list(A), list(C)], 200)


def test_a_query_that_left_stands_in_the_way_of_every_set_it_was_in() -> None:
    repairs = [("norms and head", 0.8), ("12.5% private", 0.9), ("leaves", None)]
    log = [SPRINT, *(_repair("c", what, ratio) for what, ratio in repairs)]
    trials = all_at_once([(A, B, C), (D, E), (("a", "x"), ("c", "x"))], log, REQUIRED, 0.0)
    size = SIZE | {("a", "x"): 7, ("c", "x"): 7}
    rows = outcomes_of(trials, SharingPlan(((A, B), (D, E))), size)
    assert [row["outcome"] for row in rows] == ["partly", "kept", "refused"]
    why = {"after": "12.5% private", "ratio": 0.9, "required": 0.95}
    assert [row["in_the_way"] for row in rows] == [{"c": why}, {}, {"c": why}]
    assert [row["saved_bytes"] for row in rows] == [100, 1000, 0]


def test_without_time_for_a_repair_what_the_joint_training_reached_is_told() -> None:
    (trial,) = all_at_once([(A, B, C)], [SPRINT, _repair("c", "leaves")], REQUIRED, 0.0)
    assert trial.in_the_way == {"c": {"after": NO_TIME, "ratio": 0.7, "required": 0.95}}


def test_who_left_between_sprints_says_after_which() -> None:
    (trial,) = all_at_once([(A, B, C)], [SPRINT, _repair("c", "leaves", 0.6, after="sprint 1")], REQUIRED, 0.0)
    assert trial.in_the_way == {"c": {"after": "sprint 1", "ratio": 0.6, "required": 0.95}}


def test_private_copies_take_a_layer_out_for_what_the_step_before_could_not_do() -> None:
    log = [SPRINT, _repair("b", "6.25% private", 0.93), _repair("b", "12.5% private", 0.94, private=["conv"]),
           _repair("b", "25.0% private", 0.96, private=["conv", "fc"])]  # fmt: skip
    rows = outcomes_of(all_at_once([(A, B, C), (D, E)], log, REQUIRED, 0.0), SharingPlan(((A, C),)), SIZE)
    assert [row["outcome"] for row in rows] == ["partly", "refused"]
    assert rows[0]["in_the_way"]["b"]["after"] == "6.25% private"
    assert rows[1]["in_the_way"]["b"] == {"after": "12.5% private", "ratio": 0.94, "required": 0.95}


def test_repairs_that_were_bisected_are_told_in_order_of_bytes() -> None:
    log = [SPRINT, _repair("b", "12.5% private", 0.94, cost_bytes=100, private=["conv"]),
           _repair("b", "25.0% private", 0.97, cost_bytes=1100, private=["conv", "fc"]),
           _repair("b", "6.25% private", 0.93, cost_bytes=120)]  # fmt: skip
    rows = outcomes_of(all_at_once([(A, B, C), (D, E)], log, REQUIRED, 0.0), SharingPlan(((A, C),)), SIZE)
    assert rows[0]["in_the_way"]["b"] == {"after": "the joint training", "ratio": 0.98, "required": 0.95}
    assert rows[1]["in_the_way"]["b"]["after"] == "6.25% private"


def test_who_shares_in_the_end_stood_in_nobodys_way() -> None:
    log = [SPRINT, _repair("b", "12.5% private", 0.9, private=["conv"])]
    (row,) = outcomes_of(all_at_once([(A, B, C)], log, REQUIRED, 0.0), SharingPlan(((A, B, C),)), SIZE)
    assert row["outcome"] == "kept" and row["in_the_way"] == {}


def test_a_search_tells_each_attempt_that_lost_somebody_and_what_all_cost() -> None:
    log = [
        _attempt((A, B, C), (), {"a": 0.97, "b": 0.8, "c": 0.99}, 30.0),
        _attempt((A, C), (A, C), {"a": 0.97, "c": 0.99}, 12.0),
        _attempt((D, E), (), {"a": 0.99, "b": 0.99, "d": 0.5}, 5.0, diverged=True),
    ]
    trials = one_by_one([(A, B, C), (D, E), (("a", "x"), ("b", "x"))], log, REQUIRED)
    rows = outcomes_of(trials, SharingPlan(((A, C),)), SIZE | {("a", "x"): 1})
    assert [row["outcome"] for row in rows] == ["partly", "refused", "untried"]
    assert rows[0]["in_the_way"] == {"b": {"after": "attempt 1 of 2", "ratio": 0.8, "required": 0.95}}
    assert set(rows[1]["in_the_way"]) == {"d"} and "no number" in rows[1]["in_the_way"]["d"]["after"]
    assert [row["flops"] for row in rows] == [42.0, 5.0, 0.0]


def test_where_each_was_good_enough_at_one_time_the_nearest_is_named() -> None:
    (trial,) = one_by_one([(A, B)], [_attempt((A, B), (), {"a": 0.951, "b": 0.97}, 1.0)], REQUIRED)
    assert set(trial.in_the_way) == {"a"}


def test_beyond_its_prefix_a_query_stands_in_the_way() -> None:
    sets = [tuple((query, path) for query in "abc") for path in ("conv1", "conv2", "conv3")]
    log = [
        {"query": "a", "prefix": 3, "tried": [], "flops_spent": 0.0},
        {"query": "b", "prefix": 1, "tried": [[2, 0.9], [1, 0.97]], "flops_spent": 8.0},
        {"query": "c", "prefix": 2, "tried": [[2, 0.96], [3, 0.7]], "flops_spent": 6.0},
    ]
    plan = SharingPlan((sets[0], (sets[1][0], sets[1][2])))
    rows = outcomes_of(prefixes([sets], log, REQUIRED), plan, {(q, p): 10 for q in "abc" for _, p in map(min, sets)})
    assert [row["outcome"] for row in rows] == ["kept", "partly", "refused"]
    assert rows[1]["in_the_way"] == {"b": {"after": "a prefix of 2 of 3 layers", "ratio": 0.9, "required": 0.95}}
    assert set(rows[2]["in_the_way"]) == {"b", "c"} and {row["flops"] for row in rows} == {14.0}


QUERIES = [f"q{index}" for index in range(5)]


@given(
    sets=st.lists(st.sets(st.sampled_from(QUERIES), min_size=2), min_size=1, max_size=6),
    gone=st.sets(st.tuples(st.sampled_from(QUERIES), st.integers(0, 5))),
    left=st.sets(st.sampled_from(QUERIES)),
)
def test_what_the_rows_save_is_what_the_plan_saves(sets: list[set[str]], gone: set, left: set[str]) -> None:
    whole = SharingPlan(tuple(tuple((q, f"layer{at}") for q in sorted(own)) for at, own in enumerate(sets)))
    plan, size = whole, {(query, f"layer{at}"): 10 + at for query in QUERIES for at in range(6)}
    log: list[Mapping[str, Any]] = []
    for query, at in sorted(gone):
        plan = plan.with_private(query, [f"layer{at}"])
        log.append({"query": query, "repair": "private", "ratio": 0.9, "private": [f"layer{at}"]})
    for query in sorted(left):
        plan = plan.without(query)
        log.append({"query": query, "repair": "leaves"})
    required = dict.fromkeys(QUERIES, 0.95)
    rows = outcomes_of(all_at_once(whole.shared, log, required, 0.0), plan, size)
    kept = [tuple(map(tuple, row["kept"])) for row in rows if row["kept"]]
    assert sorted(kept) == sorted(plan.shared)
    assert sum(row["saved_bytes"] for row in rows) == sum((len(own) - 1) * size[own[0]] for own in plan.shared)
    for row in rows:
        assert row["outcome"] in OUTCOMES
        lost = {query for query, _ in row["set"]} - {query for query, _ in row["kept"]}
        assert set(row["in_the_way"]) <= lost and bool(lost) == bool(row["in_the_way"])


@pytest.mark.parametrize("method", ["top-down", "gemel", "one-model", "mainstream", "ceiling", "none"])
def test_every_method_accounts_for_what_it_tried(workload: Workload, tmp_path: Path, method: str) -> None:
    out = tmp_path / "b.safetensors"
    options = replace(QUICK, recipe=replace(QUICK.recipe, epochs=2, frames_per_epoch=32), margin=0.9)
    report = merge(workload, out, method, options=options)
    rows = [json.loads(line) for line in out.with_name(f"{out.name}.log.jsonl").read_text().splitlines()]
    sets = [row for row in rows if "set" in row]
    assert rows[len(rows) - len(sets) :] == sets
    if method == "none":
        assert sets == []
        return
    assert sets and all(row["outcome"] != "untried" for row in sets)
    manifest, layers = open_bundle(out).manifest, layers_of_all(workload.queries)
    together = [set(one.members) for one in manifest.shared]
    for row in sets:
        kept = {(query, f"{path}.weight") for query, path in row["kept"]}
        assert not kept or any(kept <= members for members in together)
        assert row["kept"] == row["set"] or row["in_the_way"]
        assert row["flops"] <= report.flops
    assert sum(row["saved_bytes"] for row in sets) <= report.bytes_before - report.bytes_after
    if method == "ceiling":
        assert sum(row["saved_bytes"] for row in sets) == ceiling_bytes(layers)


def test_every_method_says_how_it_accounts() -> None:
    assert set(TRIALS) == set(METHODS)
