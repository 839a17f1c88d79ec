"""Suffix sharing, joint training and repair, each alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from merger.acceptance import Proof
from merger.budget import Budget
from merger.checkpoint import StepCache, snapshots
from merger.context import MergeContext, Merged
from merger.events import TrainingKind
from merger.init.average import copy_donor_weights, rank_donors
from merger.init.start import Start, prepare_start
from merger.methods import joint_training, top_down
from merger.methods.epochs import bisect_options, is_hopeless
from merger.methods.joint_training import (
    JointState,
    Untrained,
    intact_queries,
    light_layers,
    plan_without,
    tie_untrained,
    train_kind,
    train_together,
)
from merger.methods.registry import MergeTask
from merger.methods.repair import repair_queries
from merger.methods.top_down import TRAINING_HALF, choose_start, merge_different, share_in_rounds
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan


@pytest.fixture
def start(task: MergeTask) -> Start:
    """The start of the whole plan."""
    return prepare_start(task.ctx, task.plan, task.config)


def test_light_layers_stay_within_their_fraction(task: MergeTask) -> None:
    found = light_layers(task, 0.5)
    size = {(layer.query, layer.path): layer.bytes for layer in task.ctx.layers}
    for query, paths in found.items():
        mine = [path for members in task.plan.shared for name, path in members if name == query]
        assert paths and sum(size[query, path] for path in paths) <= 0.5 * sum(size[query, path] for path in mine)
    later = plan_without(task.plan, found)
    assert later.queries() == task.plan.queries() and later.saved_bytes(task.ctx.layers) > 0
    assert plan_without(task.plan, light_layers(task, 1.0)).shared


@pytest.mark.parametrize(
    ("holds", "share_half", "fails", "trainings"),
    [
        ("all", True, None, 1),
        ("half", True, None, 2),
        ("none", False, None, 1),
        ("none", True, 1, 2),
        ("none", True, 2, 3),
        ("none", True, None, 3),
    ],
)
def test_heavier_layers_are_trained_while_they_save_more(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch,
    holds: str, share_half: bool, fails: int | None, trainings: int,
) -> None:  # fmt: skip
    private = {1 / 2: ["stem.0", "body.0"]}
    trained: list[Merged] = []
    starts: list[Start] = []

    def light(task: MergeTask, fraction: float) -> dict[str, list[str]]:
        return dict.fromkeys(task.plan.queries(), private.get(fraction, ["stem.0"]))

    def train(task: MergeTask, early: MergeTask, start: Start, untrained: Untrained) -> Merged:
        number = len(trained)
        fell_out = number == fails or (number == 0 and holds == "none")
        plan = SharingPlan() if fell_out else untrained[0].merged.plan
        states = {
            query: {**start.states[query], "head.bias": torch.full((2,), float(number))} for query in plan.queries()
        }
        trained.append(Merged(plan, states))
        starts.append(start)
        return trained[-1]

    monkeypatch.setattr(top_down, "light_layers", light)
    monkeypatch.setattr(joint_training, "light_layers", light)
    monkeypatch.setattr(top_down, "train_together", train)
    tied = plan_without(task.plan, light(task, 1 / 2)) if holds == "half" else task.plan
    untrained = JointState(Merged(tied, {}), {}, Merged(SharingPlan(), {})), False
    found = merge_different(replace(task, config=replace(task.config, share_half=share_half)), start, untrained)
    assert len(trained) == trainings
    assert found.plan == max(trained, key=lambda one: task.saved_bytes(one.plan)).plan
    if trainings == 3:
        assert all(state["head.bias"].eq(1).all() for state in starts[2].states.values())


def test_rounds_end_where_no_layer_is_so_light(task: MergeTask, start: Start) -> None:
    best = Merged(task.plan, {})
    unbounded = replace(task, config=replace(task.config, hard_private=0.0))
    assert share_in_rounds(unbounded, unbounded, start, best) is best


def test_heavier_half_is_not_begun_once_the_budget_is_over(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Merged] = []

    def train(task: MergeTask, early: MergeTask, start: Start, untrained: Untrained) -> Merged:
        task.ctx.flops.total += 2e9
        trained.append(Merged(SharingPlan(), {}))
        return trained[-1]

    monkeypatch.setattr("merger.methods.top_down.train_together", train)
    untrained = tie_untrained(task, start)
    limited = task.with_budget(Budget(task.ctx.flops, max_flops=task.ctx.flops.total + 1e9))
    assert not merge_different(limited, start, untrained).plan.shared and len(trained) == 1
    assert task.checkpoint.log[-1]["out_of_budget"] == TRAINING_HALF and task.checkpoint.log[-1]["possible_bytes"] > 0


@pytest.mark.parametrize(("kin", "mean", "chosen"), [(True, 0.9, True), (True, 0.5, False), (False, 0.9, False)])
def test_kin_start_from_their_mean_where_it_is_nearer(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch, kin: bool, mean: float, chosen: bool
) -> None:
    def tie(task: MergeTask, start: Start) -> Untrained:
        ratios = dict.fromkeys(task.plan.queries(), mean if start.averages else 0.7)
        return JointState(Merged(task.plan, {}), ratios, Merged(SharingPlan(), {})), False

    monkeypatch.setattr(top_down, "prepare_start", lambda *_: replace(start, averages=kin))
    monkeypatch.setattr(top_down, "tie_untrained", tie)
    found, (untrained, _) = choose_start(task)
    assert found.averages is chosen and set(untrained.ratios.values()) == {mean if chosen else 0.7}


@pytest.mark.parametrize("confirmed", [{"q0", "q1", "q2"}, {"q0", "q2"}])
def test_restored_state_leaves_out_what_the_accepting_part_refuses(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch, confirmed: set[str]
) -> None:
    whole = Merged(task.plan, {query: start.states[query] for query in task.plan.queries()})
    trained = JointState(whole, dict.fromkeys(whole.states, 0.9), whole, trained=True)
    monkeypatch.setattr(joint_training, "train_kind", lambda *_: trained)
    monkeypatch.setattr(joint_training, "repair_queries", lambda *_: Merged(SharingPlan(), {}))
    monkeypatch.setattr(joint_training, "confirmed_queries", lambda *_: confirmed)
    found = train_together(task, task, start, (trained, False))
    assert found.plan.queries() == found.states.keys() == confirmed
    assert task.checkpoint.log[-1]["accepted_bytes"] == task.saved_bytes(found.plan) > 0


@pytest.mark.parametrize(("private", "evaluations"), [(0.5, 2), (0.0, 1)])
def test_no_start_is_evaluated_twice(task: MergeTask, start: Start, private: float, evaluations: int) -> None:
    tie_untrained(replace(task, config=replace(task.config, hard_start=1.1, hard_private=private)), start)
    rows = [row for row in task.checkpoint.log if "hard" in row]
    assert len(rows) == evaluations and all(row["hard"] for row in rows)


def test_first_donor_is_intact(task: MergeTask, start: Start) -> None:
    assert intact_queries(task.plan, start) == {start.donors[0]}


def test_joint_training_accepts_the_queries_that_hold_after_an_epoch(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = iter([{"q1": 0.5, "q2": 0.97}, {"q0": 0.99, "q1": 0.96, "q2": 0.6}, {"q0": 0.9, "q1": 0.5, "q2": 0.5}])

    def evaluate(ctx: MergeContext, cache: StepCache, plan: SharingPlan, queries: Any, states: Any) -> Any:
        return ctx.models(queries, states), {query: 1.0 if query == start.donors[0] else 0.1 for query in queries}

    def epochs(ctx: MergeContext, models: Any, recipe: Any, *rest: Any) -> Any:
        for _ in range(recipe.epochs):
            if (ratios := next(script, None)) is None:
                return
            yield {query: ratios.get(query, 1.0) for query in models}

    monkeypatch.setattr(joint_training, "tie_and_evaluate", evaluate)
    monkeypatch.setattr(joint_training, "train_epochs", epochs)
    found, hard = tie_untrained(task, start)
    for kind in TrainingKind:
        found = train_kind(task, kind, found, start, hard)
    rows = [row for row in task.checkpoint.log if "training" in row]
    assert [row["training"] for row in rows] == [TrainingKind.DONOR_FROZEN.value, *[TrainingKind.JOINT.value] * 2]
    assert found.best.plan.queries() == {"q0", "q2"} and found.ratios["q1"] == 0.96
    assert rows[0]["saved_bytes"] == task.saved_bytes(found.best.plan) > 0


@pytest.mark.parametrize("hard", [False, True])
def test_joint_training_of_a_hard_merge_runs_to_the_end(
    task: MergeTask, start: Start, monkeypatch: pytest.MonkeyPatch, hard: bool
) -> None:
    def evaluate(ctx: MergeContext, cache: StepCache, plan: SharingPlan, queries: Any, states: Any) -> Any:
        return ctx.models(queries, states), dict.fromkeys(queries, 0.1 if hard else 0.85)

    def epochs(ctx: MergeContext, models: Any, recipe: Any, *rest: Any) -> Any:
        for _ in range(recipe.epochs):
            yield dict.fromkeys(models, 1.0)

    monkeypatch.setattr(joint_training, "tie_and_evaluate", evaluate)
    monkeypatch.setattr(joint_training, "train_epochs", epochs)
    found, is_hard = tie_untrained(task, start)
    assert is_hard == hard
    train_kind(task, TrainingKind.JOINT, found, start, is_hard)
    rows = [row for row in task.checkpoint.log if "training" in row]
    assert len(rows) == (task.config.hard_epochs * task.recipe.epochs if hard else 1)


def test_frozen_donor_training_leaves_shared_weights(task: MergeTask, start: Start) -> None:
    task = replace(task, required=dict.fromkeys(["q0", "q1", "q2"], 2.0))
    tied, hard = tie_untrained(task, start)
    found = train_kind(task, TrainingKind.DONOR_FROZEN, tied, start, hard)
    plan = found.merged.plan
    given = copy_donor_weights(plan, {query: start.states[query] for query in plan.queries()}, start.donors)
    for members in plan.shared:
        for query, path in members:
            key = weight_key(given[query], path)
            assert torch.equal(found.merged.states[query][key], given[query][key])
    assert found.trained and not torch.equal(found.merged.states["q1"]["head.weight"], given["q1"]["head.weight"])


def test_eval_norms_keep_their_statistics_in_training(task: MergeTask, start: Start) -> None:
    ctx = task.ctx
    ctx.references = {query: replace(one, eval_norms=query == "q1") for query, one in ctx.references.items()}
    models = ctx.models(["q1", "q2"])
    before = snapshots(models)
    assert ctx.recalibrate("q1", models["q1"]) and ctx.recalibrate("q2", models["q2"], 16)
    ctx.training(models, task.recipe).epoch()
    same = {query: torch.equal(model.state_dict()["stem.1.running_mean"], before[query]["stem.1.running_mean"])
            for query, model in models.items()}  # fmt: skip
    assert same == {"q1": True, "q2": False}
    assert not torch.equal(models["q1"].state_dict()["stem.1.weight"], before["q1"]["stem.1.weight"])


def test_norms_in_eval_mode_learn_slower_than_others(task: MergeTask) -> None:
    ctx = task.ctx
    ctx.references = {query: replace(one, eval_norms=query == "q1") for query, one in ctx.references.items()}
    training = ctx.training(ctx.models(["q1", "q2"]), replace(task.recipe, norms=20.0))
    norms = {query: model.get_parameter("stem.1.weight") for query, model in training.models.items()}
    factors = {
        query: {one["factor"] for one in training.optimiser.param_groups if any(p is norm for p in one["params"])}
        for query, norm in norms.items()
    }
    assert factors == {"q1": {2.0}, "q2": {20.0}}


def test_original_harmed_by_recalibration_keeps_eval_norms(ctx: MergeContext) -> None:
    with torch.no_grad():
        for name, buffer in ctx.originals["q0"].named_buffers():
            if name.endswith("running_var"):
                buffer.mul_(25.0)
        ctx.originals["q0"].get_parameter("stem.1.weight").mul_(5.0)
    assert ctx.references["q1"].eval_norms is False
    assert isinstance(ctx.references["q0"].eval_norms, bool)
    for name, buffer in ctx.originals["q2"].named_buffers():
        buffer.fill_(0.0 if name.endswith("mean") else 1)
    assert ctx.references["q2"].eval_norms is True


def test_repair_trains_private_weights_alone(
    task: MergeTask, untrained_merge: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = MergeContext.ratio
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model: 0.5 * ratio(self, query, model))
    found = repair_queries(task, untrained_merge, {"q0": 1.0, "q1": 0.5, "q2": 1.0})
    rows = [row for row in task.checkpoint.log if "repair" in row]
    assert [row["repair"] for row in rows] == ["norms and head", "original"] and rows[0]["epochs"] >= 1
    assert "q1" not in found.plan.queries() and "q1" not in found.states
    assert all(torch.equal(found.states["q0"][name], t) for name, t in untrained_merge.states["q0"].items())


def test_repaired_query_keeps_its_shared_weights(
    task: MergeTask, untrained_merge: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model: 1.0)
    found = repair_queries(task, untrained_merge, {"q0": 1.0, "q1": 0.5, "q2": 1.0})
    assert found.plan == untrained_merge.plan
    key = "last.0.weight"
    assert torch.equal(found.states["q1"][key], untrained_merge.states["q1"][key])


def test_repair_trains_a_query_that_holds_by_luck(
    task: MergeTask, untrained_merge: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([True, False, True, False, True])  # q0, q1, q2; then q1 before and after its first epoch
    monkeypatch.setattr(task.ctx, "accept_unproven", True)
    monkeypatch.setattr(MergeContext, "confirms", lambda self, query, model: next(looks))
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model: 1.0)
    found = repair_queries(task, untrained_merge, dict.fromkeys(task.required, 1.0))
    (row,) = [row for row in task.checkpoint.log if "repair" in row]
    assert (row["query"], row["epochs"]) == ("q1", 1) and next(looks, None) is None
    assert found.plan == untrained_merge.plan and found.states["q1"] is not untrained_merge.states["q1"]


@pytest.mark.parametrize(("above", "keeps"), [(0.01, True), (-0.01, False)])
def test_repair_leaves_a_query_near_its_target_to_the_part_that_accepts(
    task: MergeTask, untrained_merge: Merged, monkeypatch: pytest.MonkeyPatch, above: float, keeps: bool
) -> None:
    proof = Proof([0], [], 0.0, np.zeros(1))
    task.ctx.references = {name: replace(one, proof=proof) for name, one in task.ctx.references.items()}
    target = task.ctx.queries["q1"].accuracy_target
    required = dict.fromkeys(task.required, (target + 1) / 2)
    spent = replace(task.with_budget(Budget(task.ctx.flops, max_flops=0.0)), required=required)
    monkeypatch.setattr(MergeContext, "confirms", lambda self, query, model: True)
    for unproven in (True, False):
        monkeypatch.setattr(task.ctx, "accept_unproven", unproven)
        found = repair_queries(spent, untrained_merge, {"q0": 1.0, "q1": target + above, "q2": 1.0})
        assert ("q1" in found.plan.queries()) is (keeps and unproven)


def test_repair_out_of_budget_restores_originals(task: MergeTask, untrained_merge: Merged) -> None:
    spent = task.with_budget(Budget(task.ctx.flops, max_flops=0.0))
    found = repair_queries(spent, untrained_merge, {"q0": 1.0, "q1": 0.5, "q2": 1.0})
    assert found.plan == untrained_merge.plan.without("q1") and "q1" not in found.states


def test_repair_of_nothing_below_changes_nothing(task: MergeTask, untrained_merge: Merged) -> None:
    assert repair_queries(task, untrained_merge, dict.fromkeys(task.required, 1.0)) is untrained_merge


@pytest.mark.parametrize("first", range(6))
def test_bisection_finds_the_first_option_that_holds(first: int) -> None:
    tried: list[int] = []
    found = bisect_options(5, lambda at: (tried.append(at) is None and at >= first, at), lambda: False)
    assert found == ((first, first) if first < 5 else None)
    assert len(tried) <= 4


def test_training_is_hopeless_when_twice_its_gain_is_too_small() -> None:
    flat = [{"a": 0.5}, {"a": 0.5}, {"a": 0.5}, {"a": 0.5}]
    rising = [{"a": 0.5}, {"a": 0.6}, {"a": 0.7}, {"a": 0.8}]
    assert is_hopeless(flat, {"a": 0.95}, 10, 2) and not is_hopeless(rising, {"a": 0.95}, 10, 2)
    assert not is_hopeless(flat[:3], {"a": 0.95}, 10, 2) and not is_hopeless(flat, {"a": 0.4}, 10, 2)


def test_initial_weights_are_the_donors(ctx: MergeContext, task: MergeTask) -> None:
    states = snapshots(ctx.originals)
    given, third = copy_donor_weights(task.plan, states, ["q2", "q0", "q1"]), states["q2"]["last.0.weight"]
    assert torch.equal(given["q0"]["last.0.weight"], third) and torch.equal(given["q1"]["last.0.weight"], third)
    assert torch.equal(given["q0"]["head.weight"], states["q0"]["head.weight"])
    assert set(rank_donors(task.plan, ctx.layers)) == {"q0", "q1", "q2"}
