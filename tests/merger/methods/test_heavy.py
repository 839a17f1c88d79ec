"""The heaviest sets first: which they are, what they begin with, and what the merge has of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import merger.methods.heavy as heavy_module
import merger.methods.wide as wide_module
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.standing import training_flops
from merger.methods.heavy import EPOCHS, PART, heaviest, heavy_first
from merger.methods.sprints import Sprints
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

NOTHING = Merged(SharingPlan(), {}).to_plain()


@pytest.mark.parametrize(("part", "paths"), [(0.01, ["last.0"]), (0.7, ["last.0"]), (0.9, ["body.0", "last.0"])])
def test_the_heaviest_are_the_fewest_sets_that_save_so_much(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, part: float, paths: list[str]
) -> None:
    monkeypatch.setattr(heavy_module, "HEAVY", part)
    chosen = heaviest(sprints).shared
    assert sorted({path for members in chosen for _, path in members}) == paths
    assert set(chosen) <= set(sprints.plan.shared), "sets are whole"


def test_all_begin_with_the_weights_of_the_model_that_shares_most_and_keep_the_rest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def sprint(now: Sprints, found: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
        begun.extend([now, found, recipe])
        return {**found, "rows": ["told"], "rate": recipe.rate}

    monkeypatch.setattr(Sprints, "sprint", sprint)
    own = snapshots(sprints.bench.originals)
    sprints = replace(sprints, plan=sprints.plan.with_private("q0", ["stem.0"]))
    found = heavy_first(sprints, own, NOTHING)
    now, given, recipe = begun
    assert now.plan == heaviest(sprints) and recipe == replace(sprints.recipe, epochs=EPOCHS, seed=sprints.bench.seed)
    assert found == {"states": given["states"], "won": NOTHING, "rows": ["told"]}
    shares_most = own["q1"]  # q0 has its stem to itself
    for query, state in given["states"].items():
        assert torch.equal(state["last.0.weight"], shares_most["last.0.weight"])
        assert torch.equal(state["stem.0.weight"], own[query]["stem.0.weight"])


def test_what_holds_of_the_heaviest_is_won(sprints: Sprints) -> None:
    quick = replace(sprints, recipe=Recipe(rate=1e-3), required=dict.fromkeys(sprints.required, 0.1))
    found = heavy_first(quick, snapshots(sprints.bench.originals), NOTHING)
    won = Merged.from_plain(found["won"])
    assert won.plan == heaviest(sprints) and found["rows"][0]["epoch"] == 0
    assert len({float(state["last.0.weight"].sum()) for state in won.states.values()}) == 1, "one weight for all"


@pytest.mark.parametrize("enough", [True, False])
def test_it_takes_no_more_than_a_part_of_the_work(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, enough: bool
) -> None:
    monkeypatch.setattr(Sprints, "sprint", lambda _self, found, _recipe: {**found, "rows": []})
    bench, recipe = sprints.bench, replace(sprints.recipe, epochs=EPOCHS)
    takes = training_flops(bench, sorted(heaviest(sprints).queries()), recipe)
    bounds = Bounds(bench.work, bench.work.total + takes / PART * (1.01 if enough else 0.99))
    found = heavy_first(replace(sprints, bounds=bounds), snapshots(bench.originals), NOTHING)
    assert bool(found["states"]) == enough and found["won"] == NOTHING


@pytest.mark.parametrize(("best", "behind", "holds"), [(0.82, set(), True), (0.8, {"q1"}, True), (0.82, set(), False)])
def test_the_start_is_made_of_what_the_heaviest_came_to_without_who_takes_nothing(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, best: float, behind: set[str], holds: bool
) -> None:
    own = snapshots(sprints.bench.originals)
    nothing, as_it_is = Merged(SharingPlan(), {}), Merged(sprints.plan, own)

    def as_they_are(_now: Sprints, begins: object, fewest: bool = False) -> Merged:
        assert begins is own
        if not fewest:
            return as_it_is
        for query, ratio in (("q1", 0.5), ("q1", best), ("q2", 0.96), ("q2", 0.3)):
            sprints.checkpoint.note({"takes": query, "ratio": ratio})
        return nothing

    heavy = Merged(SharingPlan(sprints.plan.shared[:1]), own)
    trained = {"q0": {**own["q0"], "mark": torch.ones(1)}}
    asked: list[Any] = []

    def first(now: Sprints, given: object, won: object) -> dict[str, Any]:
        asked.extend([now.plan, given, won])
        return {"states": trained, "won": heavy.to_plain() if holds else won, "rows": [{"epoch": 1}]}

    def start(_now: Sprints, given: object) -> dict[str, Any]:
        asked.append(given)
        return {"waits": {}, "apart": given, "own": given}

    monkeypatch.setattr(wide_module, "heavy_first", first)
    monkeypatch.setattr(wide_module, "_start", start)
    monkeypatch.setattr(wide_module, "_as_they_are", as_they_are)
    found = wide_module._start_far_off(sprints, {"apart": own})
    assert asked[0] == sprints.plan.without(*behind) and asked[1] is own and asked[2] == NOTHING
    assert "mark" in asked[3]["q0"] and asked[3]["q1"] is own["q1"]
    won = heavy if holds else as_it_is
    assert found["won"] == won.to_plain() and found["own"] is own, "who takes deep layers begins as its original"
    assert sprints.checkpoint.log[-1] == {"sprint": 0, "epoch": 1}
