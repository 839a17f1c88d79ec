"""Repairs: that they touch nobody else, in which order they are tried, what is kept, and when a query leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from merger.checkpoint import StepCache
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.mending.search import Case, mend
from merger.mending.several import mend_all
from merger.mending.steps import Step, copies
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key

UNSHARED = (1 / 2, 9 / 10, 1)
"""Parts of the tiny network's bytes that end between its layers."""


def test_a_repair_touches_no_other_query_and_ends_with_the_first_step_that_does(
    ctx: MergeContext, merged: Merged
) -> None:
    required = 0.9
    recipe, budget = Recipe(rate=3e-3, epochs=6), Budget(ctx.flops)
    repaired, rows = mend(ctx, merged, Case("q1", 0.5, required, recipe), StepCache(), budget)
    assert rows[0]["repair"] == "norms and head"
    for query in ("q0", "q2"):
        assert repaired.states[query] is merged.states[query]
    model = ctx.models(["q1"], repaired.states, repaired.plan)["q1"]
    assert ctx.ratio("q1", model) >= required
    for members in repaired.plan.shared:
        values = {id(members): repaired.states[q][weight_key(repaired.states[q], path)] for q, path in members}
        first = repaired.states[members[0][0]][weight_key(repaired.states[members[0][0]], members[0][1])]
        for query, path in members:
            assert torch.equal(repaired.states[query][weight_key(repaired.states[query], path)], first), values


def test_a_query_that_nothing_helps_gets_its_original_back(ctx: MergeContext, merged: Merged) -> None:
    ctx.ratio = lambda query, model: 0.5
    repaired, rows = mend(
        ctx, merged, Case("q1", 0.5, 0.95, Recipe(rate=1e-3, epochs=1)), StepCache(), Budget(ctx.flops)
    )
    dearest = copies(ctx, merged, "q1", StepCache())[-1].what
    assert [row["repair"] for row in rows] == ["norms and head", dearest, "leaves"]
    assert not any(query == "q1" for members in repaired.plan.shared for query, _ in members)
    original = ctx.originals["q1"].state_dict()
    assert all(torch.equal(repaired.states["q1"][name], original[name]) for name in original)


def test_layers_whose_answers_cannot_be_compared_are_repaired_last(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    monkeypatch.setattr("merger.mending.steps.parted", lambda *_: {"body.0": 0.1})
    most = copies(ctx, merged, "q1", StepCache())[-1].private
    assert most[0] == "body.0" and sorted(most) == ["body.0", "last.0", "stem.0"]


def test_steps_rise_in_bytes_and_none_comes_twice(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, most = copies(ctx, merged, "q1", StepCache())
    assert first.what == "78.5% of its shared bytes private" and first.private == ("last.0",), "more than a half"
    assert len(most.private) == 2 and most.cost_bytes > first.cost_bytes, "before everything goes"
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    steps = copies(ctx, merged, "q1", StepCache())
    assert [len(step.private) for step in steps] == [1, 2, 3]
    assert all(one.cost_bytes < other.cost_bytes for one, other in pairwise(steps))


def test_who_can_take_deep_layers_leaves_where_its_private_parts_alone_do_not_help(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ctx.queries["q1"].accuracy_target
    _train_by_step(monkeypatch, copies(ctx, merged, "q1", StepCache()), {})
    case = Case("q1", 0.5, target + 0.02, Recipe(), takes=True)
    left, rows = mend(ctx, merged, case, StepCache(), Budget(ctx.flops))
    assert left.plan == merged.plan.without("q1") and [row["repair"] for row in rows] == ["norms and head", "leaves"]
    near = replace(case, ratio=target + 0.015)
    kept, rows = mend(ctx, merged, near, StepCache(), Budget(ctx.flops))
    assert kept.plan == merged.plan and "leaves" not in [row["repair"] for row in rows], "with half of the margin"


@pytest.mark.parametrize("margin", ["whole", "half"])
@pytest.mark.parametrize("helps", [0, 1, 2])
def test_the_cheapest_step_that_helps_is_kept(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch, helps: int, margin: str
) -> None:
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    steps, target = copies(ctx, merged, "q1", StepCache()), ctx.queries["q1"].accuracy_target
    better = target + (0.03 if margin == "whole" else 0.015)
    _train_by_step(monkeypatch, steps, {step.what: better for step in steps[helps:]})
    kept, rows = mend(ctx, merged, Case("q1", 0.5, target + 0.02, Recipe(), alone=True), StepCache(), Budget(ctx.flops))
    assert kept.plan == steps[helps].plan
    tried = [row["repair"] for row in rows]
    assert len(tried) == len(set(tried)) and tried[0] == steps[-1].what


@pytest.mark.parametrize("affordable", [0, 1, 2])
def test_the_other_half_of_the_margin_may_cost_few_bytes_only(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch, affordable: int
) -> None:
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    steps, target = copies(ctx, merged, "q1", StepCache()), ctx.queries["q1"].accuracy_target
    most = [0, steps[0].cost_bytes, steps[1].cost_bytes][affordable]
    part = most / steps[-1].cost_bytes  # which is all of its shared bytes
    monkeypatch.setattr("merger.mending.search.MIN_BYTES", part)
    _train_by_step(monkeypatch, steps, {step.what: target + 0.02 for step in steps[1:]})
    kept, rows = mend(
        ctx, merged, Case("q1", target + 0.01, target + 0.02, Recipe(), alone=True), StepCache(), Budget(ctx.flops)
    )
    assert (kept is merged) == (affordable < 2) and kept.plan == (steps[1].plan if affordable == 2 else merged.plan)
    tried = {step.what for step in steps if step.cost_bytes <= most}
    assert {row["repair"] for row in rows} <= tried and bool(rows) == (affordable > 0)


def test_what_helped_is_kept_when_there_is_no_work_to_look_for_less(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    steps = copies(ctx, merged, "q1", StepCache())
    for better in (0.99, 0.971):  # what is required, and half of the margin
        _train_by_step(monkeypatch, steps, {step.what: better for step in steps}, flops=1e18)
        budget = Budget(ctx.flops, max_flops=ctx.flops.total + 1e18)
        kept, rows = mend(ctx, merged, Case("q1", 0.5, 0.98, Recipe(), alone=True), StepCache(), budget)
        assert kept.plan == steps[-1].plan and [row["repair"] for row in rows] == [steps[-1].what]


def test_bounded_work_goes_to_those_who_would_leave(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:

    def in_vain(ctx, begins, *_):
        ctx.flops.total += 1e18
        return {"state": begins[0], "ratio": 0.5, "epochs": 1}

    def tried(ratios: Mapping[str, float], max_flops: float) -> list[str]:
        budget = Budget(ctx.flops, max_flops=ctx.flops.total + max_flops)
        cases = [Case(query, ratio, 0.98, Recipe()) for query, ratio in ratios.items()]
        _, rows = mend_all(ctx, merged, cases, StepCache(), budget)
        return sorted(row["query"] for row in rows if "ratio" in row)

    monkeypatch.setattr("merger.mending.search.train_private", in_vain)
    assert tried({"q1": 0.5, "q2": 0.97}, 2e18) == ["q1", "q1"]
    assert tried({"q1": 0.966, "q2": 0.97}, 2e18) == ["q1", "q2"]
    assert tried({"q1": 0.5, "q2": 0.97}, math.inf) == ["q1"] * 2 + ["q2"]


def test_without_time_left_a_query_leaves_at_once(ctx: MergeContext, merged: Merged) -> None:
    _, rows = mend(ctx, merged, Case("q1", 0.5, 0.95, Recipe()), StepCache(), Budget(ctx.flops, max_flops=0.0))
    assert [row["repair"] for row in rows] == ["leaves"]


def test_a_query_with_half_the_margin_is_kept_where_nothing_helps_it_further(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = (ctx.queries["q1"].accuracy_target + 0.99) / 2
    no_time = Budget(ctx.flops, max_flops=0.0)
    kept, rows = mend(ctx, merged, Case("q1", half, 0.99, Recipe()), StepCache(), no_time)
    assert kept is merged and not rows
    _, rows = mend(ctx, merged, Case("q1", half - 0.001, 0.99, Recipe()), StepCache(), no_time)
    assert [row["repair"] for row in rows] == ["leaves"]
    steps = copies(ctx, merged, "q1", StepCache())
    _train_by_step(monkeypatch, steps, {step.what: half for step in steps})
    budget = Budget(ctx.flops)
    kept, rows = mend(ctx, merged, Case("q1", half - 0.001, 0.99, Recipe(), alone=True), StepCache(), budget)
    assert kept.plan == steps[0].plan and not any(row["repair"] == "leaves" for row in rows)


def test_of_repairs_that_are_enough_the_one_with_the_fewest_bytes_is_kept(
    ctx: MergeContext, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ctx.queries["q1"].accuracy_target
    reached = iter([target + 0.021, target + 0.024, *[target + 0.029] * 20])
    monkeypatch.setattr("merger.mending.search.train_private", lambda _b, begins, *_: {
        "state": {**begins[0]}, "ratio": next(reached), "epochs": 1})  # fmt: skip
    required = target + 0.04
    kept, rows = mend(ctx, merged, Case("q1", target, required, Recipe()), StepCache(), Budget(ctx.flops))
    assert kept.plan == merged.plan and [row["repair"] for row in rows] == ["norms and head"]
    reached = iter([target + 0.01, target + 0.021, *[target + 0.029] * 20])
    kept, _ = mend(ctx, merged, Case("q1", target, required, Recipe()), StepCache(), Budget(ctx.flops))
    assert kept.plan == copies(ctx, merged, "q1", StepCache())[0].plan
    reached = iter([target + 0.021] * 20)
    best = merged.states["q1"]
    kept, _ = mend(ctx, merged, Case("q1", target + 0.03, required, Recipe()), StepCache(), Budget(ctx.flops))
    assert kept.states["q1"] is best, "no worse for as many bytes"


def _train_by_step(
    monkeypatch: pytest.MonkeyPatch, steps: Sequence[Step], ratios: Mapping[str, float], flops: float = 0.0
) -> None:
    """Let a training under a step's plan come to the ratio given for that step, or to 0.5."""

    def train(ctx, begins, plan, *_):
        ctx.flops.total += flops
        what = next((step.what for step in steps if step.plan == plan), "its private parts alone")
        return {"state": begins[0], "ratio": ratios.get(what, 0.5), "epochs": 1}

    monkeypatch.setattr("merger.mending.search.train_private", train)
