"""The steps on layers, each alone: joint training, and norms and head alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import snapshots
from gemel.merger.context import MergeContext, Merged
from gemel.merger.init.average import copy_donor_weights, rank_donors
from gemel.merger.init.start import order_donors, start_states
from gemel.merger.methods import joint_training
from gemel.merger.methods.epochs import bisect_options, is_hopeless
from gemel.merger.methods.joint_training import light_layers, plan_without, tie_plan, train_jointly
from gemel.merger.methods.ladder import MergeCandidate
from gemel.merger.methods.private import train_private
from gemel.merger.methods.registry import MergeTask


@pytest.fixture
def candidate(untrained_merge: Merged) -> MergeCandidate:
    """All candidate with q0's weights; only q1 falls short."""
    return MergeCandidate(untrained_merge.plan, untrained_merge.states, {}, {"q0": 1.0, "q1": 0.5, "q2": 1.0})


def test_light_layers_stay_within_their_fraction(task: MergeTask) -> None:
    found = light_layers(task, 0.5)
    size = {(layer.query, layer.path): layer.bytes for layer in task.ctx.layers}
    for query, paths in found.items():
        mine = [path for members in task.plan.shared for name, path in members if name == query]
        assert paths and sum(size[query, path] for path in paths) <= 0.5 * sum(size[query, path] for path in mine)
    later = plan_without(task.plan, found)
    assert later.queries() == task.plan.queries() and later.saved_bytes(task.ctx.layers) > 0
    assert plan_without(task.plan, light_layers(task, 1.0)).shared


def test_joint_training_keeps_what_holds_after_an_epoch(
    task: MergeTask, candidate: MergeCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = iter([{"q0": 0.99, "q1": 0.96, "q2": 0.6}, {"q0": 0.9, "q1": 0.5, "q2": 0.5}])

    def epochs(ctx: MergeContext, models: Any, recipe: Any, *rest: Any) -> Any:
        yield from script

    monkeypatch.setattr(joint_training, "train_epochs", epochs)
    nearest, best = train_jointly(task, candidate, False)
    assert best.plan.queries() == {"q0", "q1"} and nearest.ratios["q1"] == 0.96
    assert nearest.plan == candidate.plan


@pytest.mark.parametrize("hard", [False, True])
def test_joint_training_of_a_hard_merge_runs_to_the_end(
    task: MergeTask, candidate: MergeCandidate, monkeypatch: pytest.MonkeyPatch, hard: bool
) -> None:
    trained = []

    def epochs(ctx: MergeContext, models: Any, recipe: Any, *rest: Any) -> Any:
        for epoch in range(recipe.epochs):
            trained.append(epoch)
            yield dict.fromkeys(models, 1.0)

    monkeypatch.setattr(joint_training, "train_epochs", epochs)
    train_jointly(task, replace(candidate, ratios=dict.fromkeys(candidate.ratios, 0.1 if hard else 0.85)), False)
    assert len(trained) == (task.config.hard_epochs * task.recipe.epochs if hard else 1)


def test_tied_donor_is_its_original(task: MergeTask) -> None:
    donor = order_donors(task.ctx, task.plan, {})[0]
    candidate = tie_plan(task, task.plan, start_states(task.ctx, task.plan, {}))
    assert candidate.ratios[donor] == 1.0
    original = task.ctx.originals[donor].state_dict()
    assert all(torch.equal(candidate.states[donor][name], tensor) for name, tensor in original.items())


def test_private_training_leaves_what_is_shared_and_who_suffices(
    task: MergeTask, candidate: MergeCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = MergeContext.ratio
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model: 0.5 * ratio(self, query, model))
    trained = train_private(task, candidate)
    assert trained.ratios["q1"] <= 0.5 and trained.plan == candidate.plan
    for members in candidate.plan.shared:
        for query, path in members:
            assert torch.equal(trained.states[query][f"{path}.weight"], candidate.states[query][f"{path}.weight"])
    assert all(torch.equal(trained.states["q0"][name], t) for name, t in candidate.states["q0"].items())
    assert trained.holding(task.least).plan.queries() == {"q0", "q2"}


def test_private_training_goes_on_while_it_gains(
    task: MergeTask, candidate: MergeCandidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter([0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0])
    monkeypatch.setattr(MergeContext, "ratio", lambda self, query, model: next(ratios))
    monkeypatch.setattr(MergeContext, "recalibrate", lambda *_: False)
    trained = train_private(replace(task, recipe=replace(task.recipe, epochs=2)), candidate)
    assert trained.ratios["q1"] == 0.99 and next(ratios) == 1.0


def test_private_training_out_of_budget_trains_nothing(task: MergeTask, candidate: MergeCandidate) -> None:
    spent = replace(task, budget=Budget(task.ctx.flops, max_flops=0.0))
    assert "q1" not in task.ctx.trained
    train_private(spent, candidate)
    assert "q1" not in task.ctx.trained


def test_eval_norms_keep_their_statistics_in_training(task: MergeTask) -> None:
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


def test_original_that_nothing_can_prove_is_not_recalibrated(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(ctx, "_needs_eval_norms", lambda query, reference: tried.append(query.id))
    ctx.proves = True
    assert ctx.references["q0"].doubt and not tried
    ctx.accept_unproven = True
    assert ctx.references["q1"].doubt and tried == ["q1"]


@pytest.mark.parametrize("first", range(6))
def test_bisection_finds_the_first_option_that_holds(first: int) -> None:
    tried: list[int] = []
    assert bisect_options(5, lambda at: tried.append(at) is None and at >= first, lambda: False) == first
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
