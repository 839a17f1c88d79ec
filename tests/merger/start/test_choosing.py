"""The start: which there are, that the nearest is taken, what it says of ancestors, and that a kill costs nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from merger.checkpoint import State, StepCache, snapshot
from merger.core.context import MergeContext
from merger.core.method import MergeOptions
from merger.methods.top_down import whole_plan
from merger.start.ancestry import COMMON, kinship
from merger.start.choosing import InitEvaluator, Start, affordable, averaged, choose_start, donated, lost, together
from models.batchnorm import batchnorms_of
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from models.workload import Workload


@pytest.fixture
def always_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merger.start.choosing.FAR", 0.0)


def test_equal_originals_are_merged_without_any_training(workload: Workload) -> None:
    first, third = workload.queries[0], workload.queries[2]
    assert isinstance(first.weights, Path) and isinstance(third.weights, Path)
    with safe_open(third.weights, "pt") as file:
        named = file.metadata()
    save_file(load_file(first.weights), third.weights, named)
    ctx = MergeContext(workload)
    plan = whole_plan(ctx, MergeOptions())
    states = choose_start(ctx, plan, StepCache()).states
    for members in plan.shared:
        if {query for query, _ in members} == {"q0", "q2"}:
            weights = [states[query][weight_key(states[query], path)] for query, path in members]
            assert torch.equal(*weights)


def test_starts_average_or_give_the_donors_weight(ctx: MergeContext) -> None:
    plan = whole_plan(ctx, MergeOptions())
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    members = next(members for members in plan.shared if len(members) == 3)
    weights = {query: originals[query][weight_key(originals[query], path)] for query, path in members}
    for states, wanted in (
        (averaged(plan, originals), torch.stack(list(weights.values())).mean(0)),
        (donated(plan, originals, "q1"), weights["q1"]),
    ):
        for query, path in members:
            assert torch.equal(states[query][weight_key(states[query], path)], wanted)
    assert torch.equal(originals["q0"]["stem.0.weight"], ctx.originals["q0"].state_dict()["stem.0.weight"])


def test_the_start_with_the_nearest_features_is_taken(ctx: MergeContext) -> None:
    said = _heard(ctx)
    plan = whole_plan(ctx, MergeOptions())
    states = choose_start(ctx, plan, StepCache()).states
    errors = {row["start"]: row["error"] for event, row in said if event == "start"}
    assert {"mean", "q0", "q1", "q2", "aligned mean"} <= set(errors) and max(errors.values()) <= 1
    found = InitEvaluator(ctx, plan.queries(), StepCache()).errors("again", plan, states)
    assert together(found.values()) == pytest.approx(min(errors.values()), rel=1e-4)


def test_where_all_are_far_off_the_best_mean_is_solved_and_the_least_is_taken(
    ctx: MergeContext, always_solved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for means_are_any_good in (True, False):
        if not means_are_any_good:
            monkeypatch.setattr("merger.start.choosing.averaged", _ruined)
        said = _heard(ctx)
        start = choose_start(ctx, _plan_of_three(), StepCache())
        errors = {row["start"]: row["error"] for event, row in said if event == "start"}
        best = min((name for name in errors if "solved" not in name), key=lambda name: errors[name])
        assert ("mean" in best) == means_are_any_good
        (solved,) = (name for name in errors if "solved" in name)
        assert errors[solved.partition(",")[0]] == min(errors["mean"], errors["aligned mean"])
        assert together(start.errors.values()) == pytest.approx(min(errors.values())), "of what it was solved to"


@pytest.mark.parametrize(("to", "taken"), [(0.5, "solved"), (0.9, "donor")])
def test_a_mean_that_a_donor_beats_may_win_once_it_is_solved(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, to: float, taken: str
) -> None:
    found = {"q0": 0.7, "q1": 0.95, "q2": 0.95, "mean": 0.8, "aligned mean": 0.75, "aligned mean, solved": to}
    evaluated = lambda _self, name, _plan, _states: dict.fromkeys(("q0", "q1", "q2"), found[name])  # noqa: E731
    monkeypatch.setattr(InitEvaluator, "errors", evaluated)
    marked = {query: {} for query in ctx.queries}
    monkeypatch.setattr("merger.start.choosing.solved", lambda *_: marked)
    start = choose_start(ctx, _plan_of_three(), StepCache())
    assert start.far and (start.states is marked) == (taken == "solved")
    assert set(start.errors.values()) == {min(to, 0.7)}


def test_a_start_is_judged_with_norms_as_they_are_and_measured_again(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {query: snapshot(model) for query, model in ctx.originals.items()}
    plan = SharingPlan(((("q0", "head"), ("q2", "head")),))  # nothing changes what the heads see
    calibrate = MergeContext.calibrate

    def ruins(self: MergeContext, query: str, model: torch.nn.Module, frames: int) -> bool:
        done = calibrate(self, query, model.requires_grad_(True), frames)
        for norm in batchnorms_of(model):
            torch.nn.init.zeros_(norm.running_mean).add_(5)  # type: ignore[arg-type]
        return done

    monkeypatch.setattr(MergeContext, "calibrate", ruins)
    errors = InitEvaluator(ctx, plan.queries(), StepCache()).errors("these", plan, states)
    assert errors == pytest.approx({"q0": 0, "q2": 0}, abs=1e-5)
    monkeypatch.setattr(MergeContext, "calibrate", calibrate)
    spoiled = {
        query: {**state, "stem.1.running_mean": state["stem.1.running_mean"] + 5} for query, state in states.items()
    }
    errors = InitEvaluator(ctx, plan.queries(), StepCache()).errors("those", plan, spoiled)
    assert max(errors.values()) < 0.5, "measured again"


def _ruined(plan: SharingPlan, states: dict[str, State]) -> dict[str, State]:
    shared = {(query, weight_key(states[query], path)) for members in plan.shared for query, path in members}
    return {
        query: {name: tensor * 0 if (query, name) in shared else tensor for name, tensor in state.items()}
        for query, state in states.items()
    }


def test_a_common_ancestor_needs_no_alignment(ctx: MergeContext) -> None:
    _give_an_ancestor(ctx)
    said = _heard(ctx)
    choose_start(ctx, _plan_of_three(), StepCache())
    (row,) = [row for event, row in said if event == "ancestry"]
    assert row["common"] and min(row["kinship"].values()) > 0.8
    assert not any(event == "aligned" or "aligned" in row.get("start", "") for event, row in said)


def test_a_start_that_is_near_enough_is_not_solved(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    said = _heard(ctx)
    monkeypatch.setattr("merger.start.choosing.FAR", 100.0)
    choose_start(ctx, _plan_of_three(), StepCache())
    assert not any("solved" in row.get("start", "") for _, row in said)


def test_models_apart_are_in_one_order_already(ctx: MergeContext) -> None:
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    apart = {query: {name: tensor + 0.01 for name, tensor in state.items()} for query, state in originals.items()}
    said = _heard(ctx)
    start = choose_start(ctx, _plan_of_three(), StepCache(), apart)
    assert {event for event, _ in said} == {"start"} and not any("aligned" in row["start"] for _, row in said)
    assert set(start.errors) == {"q0", "q1", "q2"} and set(start.apart) == set(ctx.queries)
    for query, state in start.apart.items():
        assert all(torch.equal(state[name], apart[query][name]) for name in state)
        assert torch.equal(start.states[query]["head.weight"], apart[query]["head.weight"])


def test_models_apart_of_originals_without_a_common_ancestor_were_aligned(ctx: MergeContext) -> None:
    start = choose_start(ctx, _plan_of_three(), StepCache())
    moved = [q for q, state in start.apart.items()
             if not torch.equal(state["stem.0.weight"], ctx.originals[q].get_parameter("stem.0.weight"))]  # fmt: skip
    assert len(moved) == 2, "into the order of the third"


def test_far_behind_is_who_keeps_next_to_nothing_in_a_hard_merge() -> None:
    errors = {"a": 0.5, "b": 0.9, "c": 0.6, "d": 0.2}
    assert Start({}, errors, {}, far=True).far_behind == {"b": 0.9} and Start({}, errors, {}).far_behind == {}
    assert Start({}, {**errors, "b": 0.7}, {}, far=True).far_behind == {}, "a median of 0.45 is kept, and 0.3 of b"
    assert Start({}, dict.fromkeys("abc", 0.97), {}, far=True).far_behind == {}, "all alike: nobody is behind"


def test_a_start_is_far_off_by_what_it_loses_before_anything_is_solved(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _heard(ctx)
    choose_start(ctx, _plan_of_three(), StepCache())
    least = min(row["error"] for event, row in said if event == "start" and "solved" not in row["start"])
    for far in (least - 0.01, least + 0.01):
        monkeypatch.setattr("merger.start.choosing.FAR", far)
        assert choose_start(ctx, _plan_of_three(), StepCache()).far == (far < least)


def test_independent_originals_have_no_common_ancestor(ctx: MergeContext) -> None:
    states = {query: snapshot(model) for query, model in ctx.originals.items()}
    assert max(kinship(_plan_of_three(), ctx.layers, states).values()) < COMMON


def test_a_start_goes_on_where_it_was_stopped(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, always_solved: None
) -> None:
    plan, journal = whole_plan(ctx, MergeOptions()), StepCache()
    before = ctx.flops.total
    wanted = choose_start(ctx, plan, journal).states
    spent, done = ctx.flops.total - before, journal.state_dict()["done"]
    for stop in (1, len(done) // 2, len(done) - 1):
        ctx.flops.total = before
        stopped, steps = StepCache(), []
        stopped.meter = ctx.flops

        def dying(stopped: StepCache = stopped, steps: list[Any] = steps, stop: int = stop) -> None:
            steps.append(None)
            if len(steps) == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(stopped, "tick", dying)
        with pytest.raises(KeyboardInterrupt):
            choose_start(ctx, plan, stopped)
        resumed = StepCache()
        resumed.meter = ctx.flops
        resumed.load_state_dict(stopped.state_dict())
        states = choose_start(ctx, plan, resumed).states
        assert ctx.flops.total - before == pytest.approx(spent)
        assert all(torch.equal(states[q][name], wanted[q][name]) for q in wanted for name in wanted[q])


def _give_an_ancestor(ctx: MergeContext) -> None:
    """All weights become those of the first original with noise of their own."""
    first = snapshot(ctx.originals["q0"])
    for seed, query in enumerate(ctx.queries):
        state = snapshot(ctx.originals[query])
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in first.items():
            if name in state and state[name].shape == tensor.shape and tensor.ndim > 1:
                state[name] = tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        ctx.originals[query].load_state_dict(state)


def _plan_of_three() -> SharingPlan:
    return SharingPlan(tuple(tuple((q, path) for q in ("q0", "q1", "q2")) for path in ("stem.0", "body.0", "last.0")))


def test_starts_are_judged_and_solved_with_one_model_after_the_other(
    ctx: MergeContext, always_solved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, most, own = list[weakref.ref](), 0, MergeContext.models

    def models(ctx: MergeContext, *given: Any) -> dict[str, nn.Module]:
        nonlocal most
        found = own(ctx, *given)
        made.extend(map(weakref.ref, found.values()))
        gc.collect()
        most = max(most, sum(one() is not None for one in made))
        return found

    monkeypatch.setattr(MergeContext, "models", models)
    choose_start(ctx, _plan_of_three(), StepCache())
    assert most == 2, "a card has no room for all of them beside the originals"


def _heard(ctx: MergeContext) -> list[tuple[str, dict[str, Any]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    ctx.progress = lambda event, **fields: said.append((event, fields))
    return said


def test_a_start_that_leaves_some_with_nothing_is_worse_than_one_that_leaves_all_with_little() -> None:
    assert together([0.0, 0.97, 0.97]) > together([0.8, 0.8, 0.8])
    assert together([0.0, 0.0]) == 0 and together([0.5, 0.5]) == pytest.approx(0.5)
    assert together([1.0, 0.0]) < 1, "one that has lost all does not make the others' loss invisible"


def test_starts_that_there_is_no_work_for_are_left_out_but_for_the_first() -> None:
    costs = {"mean": 2.0, "aligned": 5.0, "q0": 2.0, "q1": 2.0}
    assert affordable(costs, float("inf"))[0] == list(costs)
    assert affordable(costs, 6.5) == (["mean", "q0", "q1"], 0.5)
    assert affordable(costs, 1.0) == (["mean"], -1.0)


def test_with_no_work_for_more_the_mean_is_the_start(ctx: MergeContext, always_solved: None) -> None:
    said = _heard(ctx)
    start = choose_start(ctx, _plan_of_three(), StepCache(), max_flops=1.0)
    assert [row["start"] for event, row in said if event == "start"] == ["mean"] and start.far


def test_features_from_a_checkpoint_are_brought_to_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back into the processor's memory, and what they are held against is on a card."""
    brought, moved = list[object](), torch.Tensor.to

    def to(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        brought.append(where[0])
        return moved(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", to)
    features = torch.randn(4, 3, 2, 2)
    assert lost([features], [features]) == pytest.approx(0.0, abs=1e-6)
    assert features.device in brought
