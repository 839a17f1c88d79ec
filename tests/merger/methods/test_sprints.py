"""Sprints: how long and how fast they are, who is eased, who leaves between them, and where they end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from merger.checkpoint import Checkpoint, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.methods.deep import Deep
from merger.methods.sprints import Sprints
from merger.training.loop import Diverged, Training
from merger.training.recipe import Recipe


@pytest.mark.parametrize(("begins", "apart", "pace", "epochs"), [
    (0.94, False, 1.0, [3, 8, 16]), (0.8, False, 1.0, [8]), (0.94, True, 1.0, [8]), (0.94, True, 0.5, [4]),
])  # fmt: skip
def test_a_merge_that_begins_far_off_has_one_long_sprint_and_slower_ones_where_the_heaviest_have_trained(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, begins: float, apart: bool, pace: float, epochs: list[int]
) -> None:
    recipes: list[Recipe] = []

    def sprint(_self: object, found: dict[str, Any], recipe: Recipe, _eased: object) -> dict[str, Any]:
        recipes.append(recipe)
        return {**found, "rows": [], "ratios": dict.fromkeys(found["ratios"], 0.945)}

    lasts: list[bool] = []
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, last: lasts.append(last) or found)
    monkeypatch.setattr(Sprints, "sprint", sprint)
    replace(sprints, whole=sprints.plan if apart else None, pace=pace).run(_begun(sprints, begins))
    assert [recipe.epochs for recipe in recipes] == epochs
    assert lasts == [False] * (len(epochs) - 1) + [True], "all that are near try alone when no sprint follows"
    assert [recipe.rate for recipe in recipes] == [
        pace * sprints.recipe.rate / 2**index for index in range(len(epochs))
    ]


@pytest.mark.parametrize(("met", "left", "takes"), [
    (["q0", "q2"], 1e15, True), (["q0"], 1e15, True), (["q0", "q1", "q2"], 1e15, False), ([], 1e15, True),
    (["q0", "q2"], 0.0, False),
])  # fmt: skip
def test_who_is_below_after_the_first_sprint_takes_deep_layers_of_those_who_are_not(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, met: list[str], left: float, takes: bool
) -> None:
    own = snapshots(sprints.ctx.originals)
    begun = _begun(sprints, 0.94)
    took: list[tuple[set[str], list[str]]] = []

    def run(deep: Deep, standing: Merged, own_: object, takers: list[str]) -> dict[str, Any]:
        assert own_ is own and deep.plan == sprints.plan and deep.budget.flops_left <= 0.8 * left
        took.append((set(standing.states), takers))
        pairs = [(("q0", "last.0"), (query, "last.0")) for query in takers]
        merged = Merged(standing.plan.with_pairs(pairs), {**standing.states, **{one: own[one] for one in takers}})
        return {"merged": merged.to_plain(), "rows": [{"takes": "told"}]}

    def sprint(_self: object, found: dict[str, Any], *_: object) -> dict[str, Any]:
        ratios = {query: 0.97 if query in met else 0.91 if query == "q0" else 0.9 for query in found["ratios"]}
        return {**found, "rows": [], "ratios": ratios}

    monkeypatch.setattr(Deep, "run", run)
    monkeypatch.setattr(Deep, "stand", lambda _deep, query, *_: {"state": own[query], "row": {"takes": "told"}})
    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    monkeypatch.setattr(Sprints, "_epochs", lambda *_, **__: 1)
    budget = Budget(sprints.ctx.flops, sprints.ctx.flops.total + left)
    trained = replace(sprints, own=own, budget=budget).run(begun)
    stands = set(met) or {"q0"}
    takers = sorted({"q0", "q1", "q2"} - stands)
    assert [(those, sorted(them)) for those, them in took] == ([(stands, takers)] if takes else []), "once"
    assert trained.plan == sprints.plan, "the training goes on with all"
    if takes:
        assert any(("q0", "last.0") in members for members in trained.won.plan.shared)
        assert trained.won.plan.queries() == {"q0", "q1", "q2"} and sprints.checkpoint.log[0] == {"takes": "told"}


def test_who_is_lost_after_a_sprint_leaves_before_the_next_one(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []

    def sprint(_self: object, found: dict[str, Any], _recipe: Recipe, _eased: object) -> dict[str, Any]:
        trained.append(sorted(found["ratios"]))
        return {**found, "rows": [], "ratios": {query: 0.7 if query == "q1" else 0.9 for query in found["ratios"]}}

    alone: list[set[str]] = []
    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(Sprints, "_alone", lambda self, found, _last: alone.append(self.plan.queries()) or found)
    left = sprints.run(_begun(sprints, 0.94))
    assert alone == [{"q0", "q1", "q2"}, {"q0", "q2"}, {"q0", "q2"}]
    assert trained == [["q0", "q1", "q2"], ["q0", "q2"], ["q0", "q2"]] and set(left.states) == {"q0", "q2"}
    assert left.plan == sprints.plan.without("q1")
    (row,) = sprints.checkpoint.log
    assert (row["query"], row["repair"], row["after"], row["ratio"]) == ("q1", "leaves", "sprint 1", 0.7)


def test_a_sprint_that_was_begun_goes_on_as_it_was_planned_though_time_is_over(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def sprint(_self: object, found: dict[str, Any], recipe: Recipe, _eased: object) -> dict[str, Any]:
        begun.append(recipe.epochs)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return {**found, "rows": []}

    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    monkeypatch.setattr(Sprints, "sprint", sprint)
    one = training_flops(ctx, list(ctx.queries), Recipe(epochs=1))
    with pytest.raises(KeyboardInterrupt):
        replace(sprints, budget=Budget(ctx.flops, 2.5 * one)).run(_begun(sprints, 0.94))
    replace(sprints, budget=Budget(ctx.flops, 0.0)).run(_begun(sprints, 0.94))
    assert begun == [2, 2], "and nothing after it"


def test_a_sprint_is_judged_while_its_rate_falls(sprints: Sprints) -> None:
    found = _out_of_reach(sprints).sprint(_tied(sprints), Recipe(epochs=4, frames_per_epoch=16))
    assert [row["epoch"] for row in found["rows"]] == [0, 2, 3, 4]


def test_what_saves_most_with_all_its_queries_met_is_kept_from_the_first_validation_on(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = [{"q0": 0.96, "q1": 0.5, "q2": 0.97}, {"q0": 0.94, "q1": 0.94, "q2": 0.94}, {"q0": 0.99, "q2": 0.96}]
    left, bounded = iter(evaluated), sprints.plan.without("q1")
    monkeypatch.setattr("merger.core.attempt.evaluate_all", lambda *_: {"q1": 0.9, **next(left)})
    found = sprints.sprint(_tied(sprints), Recipe(epochs=5, frames_per_epoch=16))
    assert found["ratios"] == evaluated[1], "the nearest of all; nobody of them has what is required"
    won = Merged.from_plain(found["won"])
    assert won.plan == bounded and set(won.states) == {"q0", "q2"}
    model = sprints.ctx.models(["q0"], won.states, won.plan)["q0"]
    assert not torch.equal(model.get_parameter("head.weight"), sprints.ctx.originals["q0"].get_parameter("head.weight"))
    again = sprints.run({**found, "ratios": dict.fromkeys(sprints.required, 1.0)})
    assert again.won.plan == sprints.plan, "until more is won"
    assert replace(sprints, end=Budget(sprints.ctx.flops, 0.0), budget=Budget(sprints.ctx.flops, 0.0)).run(
        found).won.plan == bounded, "with no work left"  # fmt: skip


def test_who_has_what_is_required_makes_room_for_the_others(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    planned: list[set[str]] = []

    def training(_models: object, _recipe: Recipe, eased: set[str], _plan: object) -> None:
        seen.append(set(eased))
        raise Diverged("none")

    epochs = Sprints._epochs

    def plan(sprints: Sprints, wanted: float, eased: list[str], **how: bool) -> int:
        planned.append(set(eased))
        return epochs(sprints, wanted, eased, **how)

    monkeypatch.setattr(Sprints, "_epochs", plan)
    monkeypatch.setattr(ctx, "training", training)
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    sprints.run({**_tied(sprints), "ratios": {"q0": 0.95, "q1": 0.9, "q2": 1.0}})
    assert seen == [set(), {"q0", "q2"}, {"q0", "q2"}], "half an epoch flatters: nobody is eased in the first sprint"
    assert planned == seen
    whole = training_flops(ctx, list(ctx.queries), Recipe(epochs=1))
    bounded = replace(sprints, budget=Budget(ctx.flops, ctx.flops.total + 4 * whole))
    assert bounded._epochs(16, set()) == 4 < bounded._epochs(16, {"q0", "q2"}) < 8, "what is saved buys epochs"
    assert bounded._epochs(3, {"q0", "q2"}, joined=True) == 4, "one long fall for who joins, planned without what eases"
    assert bounded._epochs(2, set(), joined=True) == 4, "up to twice as long"
    assert bounded._epochs(1, set(), joined=True) == 2


def test_who_falls_below_is_eased_no_longer_until_it_is_back(sprints: Sprints, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = iter([{"q0": 0.94, "q2": 0.96}, {"q0": 0.97, "q2": 0.97}, {"q0": 0.9, "q2": 0.95}])
    eased: list[list[str]] = []
    monkeypatch.setattr("merger.core.attempt.evaluate_all", lambda *_: {"q1": 0.9, **next(evaluated)})
    epoch = Training.epoch
    monkeypatch.setattr(Training, "epoch", lambda self: eased.append(self.eased) or epoch(self))
    before = {**_tied(sprints), "ratios": {"q0": 0.95, "q1": 0.9, "q2": 1.0}}
    sprints.sprint(before, Recipe(epochs=5, frames_per_epoch=16), easing=True)
    assert eased == [["q0", "q2"], ["q0", "q2"], ["q0", "q2"], ["q2"], ["q0", "q2"]]


def test_a_sprint_that_takes_more_work_than_planned_goes_on_to_the_end_of_all(
    ctx: MergeContext, sprints: Sprints, tmp_path: Path
) -> None:
    before, recipe, spent = _tied(sprints), Recipe(epochs=4, frames_per_epoch=16), Budget(ctx.flops, 0.0)
    found = replace(_out_of_reach(sprints), budget=spent).sprint(before, recipe)
    assert [row["epoch"] for row in found["rows"]] == [0, 2, 3, 4]
    cut = replace(_out_of_reach(sprints), end=spent, checkpoint=Checkpoint(tmp_path / "cut", {}, False))
    found = cut.sprint(before, recipe)
    assert [row["epoch"] for row in found["rows"]] == [0, 2], "but not past it, when one epoch was judged"


def _begun(sprints: Sprints, ratio: float) -> dict[str, Any]:
    """This ratio of all, and no states, for sprints that are not trained."""
    return {"states": {query: {} for query in sprints.required}, "ratios": dict.fromkeys(sprints.required, ratio)}


def _tied(sprints: Sprints) -> dict[str, Any]:
    """All tied, and half of what is required to begin with."""
    models = sprints.ctx.tied(sprints.plan, list(sprints.ctx.queries))
    return {"states": snapshots(models), "ratios": dict.fromkeys(models, 0.5)}


def _out_of_reach(sprints: Sprints) -> Sprints:
    """Sprints that go on to their end."""
    return replace(sprints, required=dict.fromkeys(sprints.required, 2.0))
