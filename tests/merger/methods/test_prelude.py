"""What holds before all train together: who stands for the others, and what the heaviest sets come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import merger.methods.prelude as prelude_module
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.standing import training_flops
from merger.methods.deep import Deep
from merger.methods.prelude import EPOCHS, PART, heaviest, heavy_first, prelude
from merger.methods.sprints import Sprints
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

NOTHING = Merged(SharingPlan(), {}).to_plain()


@pytest.mark.parametrize(("part", "paths"), [(0.01, ["last.0"]), (0.7, ["last.0"]), (0.9, ["body.0", "last.0"])])
def test_the_heaviest_are_the_fewest_sets_that_save_so_much(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, part: float, paths: list[str]
) -> None:
    monkeypatch.setattr(prelude_module, "HEAVY", part)
    chosen = heaviest(sprints).shared
    assert sorted({path for members in chosen for _, path in members}) == paths
    assert set(chosen) <= set(sprints.plan.shared), "sets are whole"


def test_all_begin_with_the_weights_of_who_gives_and_keep_the_rest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def sprint(now: Sprints, found: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
        begun.extend([now, found, recipe])
        return {**found, "rows": ["told"], "rate": recipe.rate}

    monkeypatch.setattr(Sprints, "sprint", sprint)
    own = snapshots(sprints.bench.originals)
    found = heavy_first(sprints, own, "q1", NOTHING)
    now, given, recipe = begun
    assert now.plan == heaviest(sprints) and recipe == replace(sprints.recipe, epochs=EPOCHS, seed=sprints.bench.seed)
    assert found == {"states": given["states"], "won": NOTHING, "rows": ["told"]}
    gives = own["q1"]
    for query, state in given["states"].items():
        assert torch.equal(state["last.0.weight"], gives["last.0.weight"])
        assert torch.equal(state["stem.0.weight"], own[query]["stem.0.weight"])


def test_what_holds_of_the_heaviest_is_won(sprints: Sprints) -> None:
    quick = replace(sprints, recipe=Recipe(rate=1e-3), required=dict.fromkeys(sprints.required, 0.1))
    found = heavy_first(quick, snapshots(sprints.bench.originals), "q0", NOTHING)
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
    found = heavy_first(replace(sprints, bounds=bounds), snapshots(bench.originals), "q0", NOTHING)
    assert bool(found["states"]) == enough and found["won"] == NOTHING
    won = Merged(heaviest(sprints), {}).to_plain()
    assert not heavy_first(sprints, snapshots(bench.originals), "q0", won)["states"], "there is no more to win"


@pytest.mark.parametrize(("q1", "far", "giver"), [(0.94, True, "q1"), (0.96, True, "q0"), (0.94, False, "q0")])
def test_who_bears_least_of_the_one_that_shares_most_stands_for_the_others(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, q1: float, far: bool, giver: str
) -> None:
    own, asked = snapshots(sprints.bench.originals), list[tuple[str, list[str], bool]]()
    ratios = {"q0": [0.5, 0.82], "q1": [0.3, q1], "q2": [0.98, 0.2]}
    heavy: list[Any] = []

    def run(deep: Deep, standing: Merged, begins: object, takers: list[str]) -> dict[str, Any]:
        assert begins is own and deep.recipe is None
        asked.append((next(iter(standing.states)), takers, deep.fewest))
        rows = [{"takes": query, "ratio": ratio} for query in takers for ratio in ratios[query]]
        pairs = [((giver, "last.0"), (takers[-1], "last.0"))]
        merged = standing if deep.fewest else Merged(SharingPlan().with_pairs(pairs), own)
        return {"merged": merged.to_plain(), "rows": [*rows, {"query": takers[0], "repair": "takes deep layers"}]}

    def first(*given: Any) -> dict[str, Any]:
        heavy.extend(given)
        return {"states": {"q2": {}}, "won": NOTHING, "rows": [{"epoch": 1}]}

    monkeypatch.setattr(Deep, "run", run)
    monkeypatch.setattr(prelude_module, "heavy_first", first)
    found = prelude(sprints, own, far)
    takers = [query for query in ("q0", "q1", "q2") if query != giver]
    assert asked == [("q0", ["q1", "q2"], True), (giver, takers, False)][0 if far else 1 :]
    if not far:
        assert set(Merged.from_plain(found["won"]).states) == {giver, "q2"} and not found["states"] and not heavy
        return
    assert heavy[0].plan == sprints.plan and heavy[1] is own, "0.82 is no less than 0.85 of what is required"
    assert heavy[2] == giver and set(Merged.from_plain(heavy[3]).states) == {giver, "q2"}
    assert found == {"states": {"q2": {}}, "won": NOTHING}
    assert sprints.checkpoint.log[-1] == {"sprint": 0, "epoch": 1}


def test_who_is_far_below_with_few_layers_has_no_part_in_the_heaviest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, plans = snapshots(sprints.bench.originals), list[SharingPlan]()
    taken = Merged(SharingPlan(sprints.plan.shared[:1]), own)
    monkeypatch.setattr(prelude_module, "giver_of", lambda *_: "q2")
    monkeypatch.setattr(prelude_module, "_took", lambda *_: (taken, {"q0": 0.8, "q1": 0.81}))
    first = lambda others, *_: plans.append(others.plan) or {"states": {}, "won": taken.to_plain(), "rows": []}  # noqa: E731
    monkeypatch.setattr(prelude_module, "heavy_first", first)
    assert prelude(sprints, own, far=True) == {"won": taken.to_plain(), "states": {}}
    assert plans == [sprints.plan.without("q0")]


def test_who_has_no_layer_in_common_with_the_one_that_stands_trains_with_the_heaviest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def first(*given: Any) -> dict[str, Any]:
        asked.extend(given)
        return {"states": {}, "won": NOTHING, "rows": []}

    monkeypatch.setattr(Deep, "run", lambda _deep, standing, *_: {"merged": standing.to_plain(), "rows": []})
    monkeypatch.setattr(prelude_module, "heavy_first", first)
    prelude(sprints, snapshots(sprints.bench.originals), far=True)
    assert (asked[0].plan, asked[2]) == (sprints.plan, "q0"), "nobody could take, so that nobody is behind"
