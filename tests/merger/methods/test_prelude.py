"""What holds before all train together: who stands for the others, and what the heaviest sets come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import merger.methods.prelude as prelude_module
from merger.checkpoint import snapshots
from merger.core.budget import Budget
from merger.core.merged import Merged
from merger.core.snapshot import training_flops
from merger.methods.deep import Deep
from merger.methods.prelude import EPOCHS, PART, RUNGS, heaviest, heavy_first, prelude
from merger.methods.sprints import Sprints
from merger.start.choosing import Start
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

NOTHING = Merged(SharingPlan(), {}).to_plain()
BEFORE: dict[str, Any] = {"won": NOTHING, "states": {}, "tied": SharingPlan().to_json()}


@pytest.mark.parametrize(("part", "paths"), [(0.01, ["last.0"]), (0.7, ["last.0"]), (0.9, ["body.0", "last.0"])])
def test_the_heaviest_are_the_fewest_sets_that_save_so_much(sprints: Sprints, part: float, paths: list[str]) -> None:
    chosen = heaviest(sprints, part).shared
    assert sorted({path for members in chosen for _, path in members}) == paths
    assert set(chosen) <= set(sprints.plan.shared), "sets are whole"


def test_all_begin_with_the_weights_of_who_gives_and_keep_the_rest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _sprints_of(monkeypatch)
    own = snapshots(sprints.ctx.originals)
    found = heavy_first(sprints, own, "q1", BEFORE, 0.7)
    (now, given, recipe), plan = begun[0], heaviest(sprints, 0.7)
    assert now.plan == plan and recipe == replace(sprints.recipe, epochs=EPOCHS, seed=sprints.ctx.seed)
    assert found == {"states": given["states"], "won": NOTHING, "ratios": given["ratios"], "rows": ["told"],
                     "tied": plan.to_json()}  # fmt: skip
    for query, state in given["states"].items():
        assert torch.equal(state["last.0.weight"], own["q1"]["last.0.weight"])
        assert torch.equal(state["stem.0.weight"], own[query]["stem.0.weight"])


def test_what_is_tied_next_begins_with_the_best_start_and_trains_more_slowly(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, asked = _sprints_of(monkeypatch), list[Any]()
    own, first = snapshots(sprints.ctx.originals), heaviest(sprints, 0.7)
    trained = {
        query: {**state, "last.0.weight": torch.ones_like(state["last.0.weight"])} for query, state in own.items()
    }

    def choose(_ctx: object, plan: SharingPlan, _journal: object, apart: Any, *_: object) -> Start:
        asked.append(plan)
        assert all(torch.equal(apart[query]["last.0.weight"], trained["q0"]["last.0.weight"]) for query in own)
        states = {query: {**state, "body.0.weight": own["q2"]["body.0.weight"]} for query, state in apart.items()}
        return Start(states, {}, apart)

    monkeypatch.setattr(prelude_module, "choose_start", choose)
    found = heavy_first(sprints, own, "q0", {**BEFORE, "states": trained, "tied": first.to_json()}, 0.9)
    now, given, recipe = begun[0]
    assert recipe.rate == sprints.recipe.rate / 2 and now.plan == heaviest(sprints, 0.9)
    assert {path for members in asked[0].shared for _, path in members} == {"body.0"}, "the others stay as they are"
    assert torch.equal(given["states"]["q0"]["last.0.weight"], trained["q0"]["last.0.weight"])
    assert found["tied"] == now.plan.to_json()


def test_what_holds_of_the_heaviest_is_won(sprints: Sprints) -> None:
    quick = replace(sprints, recipe=Recipe(rate=1e-3), required=dict.fromkeys(sprints.required, 0.1))
    found = heavy_first(quick, snapshots(sprints.ctx.originals), "q0", BEFORE, 0.7)
    won = Merged.from_plain(found["won"])
    assert won.plan == heaviest(sprints, 0.7) and found["rows"][0]["epoch"] == 0
    assert len({float(state["last.0.weight"].sum()) for state in won.states.values()}) == 1, "one weight for all"


@pytest.mark.parametrize("enough", [True, False])
@pytest.mark.parametrize(("tied", "part", "takes"), [(0.0, 0.7, 1.0), (0.7, 0.9, PART)])
def test_the_first_takes_no_more_than_the_work_that_is_left_what_follows_no_more_than_a_part(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, tied: float, part: float, takes: float, enough: bool
) -> None:
    _sprints_of(monkeypatch)
    own = snapshots(sprints.ctx.originals)
    monkeypatch.setattr(prelude_module, "choose_start", lambda *_: Start(own, {}, own))
    ctx, recipe, plan = sprints.ctx, replace(sprints.recipe, epochs=EPOCHS), heaviest(sprints, part)
    needed = training_flops(ctx, sorted(plan.queries()), recipe) / takes
    budget = Budget(ctx.flops, ctx.flops.total + needed * (1.01 if enough else 0.99))
    before = {**BEFORE, "tied": (heaviest(sprints, tied) if tied else SharingPlan()).to_json()}
    found = heavy_first(replace(sprints, budget=budget), own, "q0", before, part)
    assert bool(found["rows"]) == bool(found["states"]) == enough and found["won"] == NOTHING


def test_nothing_is_trained_where_no_more_can_be_won_or_tied(sprints: Sprints) -> None:
    own, plan = snapshots(sprints.ctx.originals), heaviest(sprints, 0.7)
    for before in ({**BEFORE, "won": Merged(plan, {}).to_plain()}, {**BEFORE, "tied": plan.to_json()}):
        assert heavy_first(sprints, own, "q0", before, 0.7) == {**before, "ratios": {}, "rows": []}


@pytest.mark.parametrize(("q1", "far", "giver"), [(0.94, True, "q1"), (0.96, True, "q0"), (0.94, False, "q0")])
def test_who_bears_least_of_the_one_that_shares_most_stands_for_the_others(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, q1: float, far: bool, giver: str
) -> None:
    own, asked = snapshots(sprints.ctx.originals), list[tuple[str, list[str], bool]]()
    ratios = {"q0": [0.5, 0.82], "q1": [0.3, q1], "q2": [0.98, 0.2]}

    def run(deep: Deep, standing: Merged, begins: object, takers: list[str], taking: Any) -> dict[str, Any]:
        assert begins is own and deep.recipe is None
        assert taking == ({"q2": "begun"} if asked else {}), "what was found is known"
        assert set(standing.states) == {next(iter(standing.states))}, "nothing was merged yet"
        asked.append((next(iter(standing.states)), takers, deep.fewest))
        rows = [{"takes": query, "ratio": ratio} for query in takers for ratio in ratios[query]]
        pairs = [((giver, "last.0"), (takers[-1], "last.0"))]
        merged = standing if deep.fewest else Merged(SharingPlan().with_pairs(pairs), own)
        rows = [*rows, {"query": takers[0], "repair": "takes deep layers"}]
        return {"merged": merged.to_plain(), "rows": rows, "taking": {"q2": "begun"}}

    monkeypatch.setattr(Deep, "run", run)
    heavy = _heavy_first(monkeypatch, [])
    found = prelude(sprints, own, far)
    takers = [query for query in ("q0", "q1", "q2") if query != giver]
    assert asked == [("q0", ["q1", "q2"], True), (giver, takers, False)][0 if far else 1 :]
    assert set(Merged.from_plain(found["won"]).states) == {giver, takers[-1]} and not found["states"]
    assert len(heavy) == far
    for others, begins, stands, before, part in heavy:
        assert others.plan == sprints.plan and begins is own, "0.82 is no less than 0.85 of what is required"
        assert (stands, part) == (giver, RUNGS[0]) and before["won"] == found["won"]


def test_what_was_taken_to_find_the_giver_is_kept_where_it_saves_most(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = snapshots(sprints.ctx.originals)
    more, less = (Merged(heaviest(sprints, part), own) for part in (0.9, 0.7))
    assert more.plan != less.plan
    monkeypatch.setattr(
        prelude_module, "_took", lambda *_, fewest=False: _took(more if fewest else less, q1=0.5, q2=1.0)
    )
    _heavy_first(monkeypatch, [])
    assert Merged.from_plain(prelude(sprints, own, far=True)["won"]).plan == more.plan
    assert Merged.from_plain(prelude(sprints, own, far=False)["won"]).plan == less.plan


def test_who_was_far_below_and_is_not_asked_again_is_left_out_of_the_heaviest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Merged.from_plain(NOTHING)

    def took(_sprints: object, _own: object, giver: str, begun: Any, fewest: bool = False) -> Any:
        return _took(nothing, q1=0.5, q2=0.4) if fewest else _took(nothing, q0=0.9, **begun.ratios)

    monkeypatch.setattr(prelude_module, "_took", took)
    heavy = _heavy_first(monkeypatch, [])
    prelude(sprints, snapshots(sprints.ctx.originals), far=True)
    assert heavy[0][0].plan == sprints.plan.without("q1") and heavy[0][2] == "q2", "not who gives"


@pytest.mark.parametrize(("reached", "steps"), [([0.95, 0.95], 2), ([0.95, 0.94], 2), ([0.94], 1)])
def test_more_is_tied_once_the_heaviest_hold(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch, reached: list[float], steps: int
) -> None:
    own = snapshots(sprints.ctx.originals)
    monkeypatch.setattr(prelude_module, "_took", lambda *_, **__: _took(Merged.from_plain(NOTHING), q0=0.8, q1=0.81))
    heavy = _heavy_first(monkeypatch, reached)
    found = prelude(sprints, own, far=True)
    assert [given[-1] for given in heavy] == list(RUNGS[:steps])
    assert all(given[0].plan == sprints.plan.without("q0") for given in heavy), "it is far below with few layers"
    assert [given[3]["states"] for given in heavy] == [{}, {"q0": {"trained": 1}}][:steps]
    assert found["states"] == {"q0": {"trained": steps}}
    assert sprints.checkpoint.log == [{"sprint": 0, "epoch": step + 1} for step in range(steps)]


def test_who_has_no_layer_in_common_with_the_one_that_stands_trains_with_the_heaviest(
    sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deep, "run", lambda _deep, standing, *_: {
        "merged": standing.to_plain(), "rows": [], "taking": {}})  # fmt: skip
    heavy = _heavy_first(monkeypatch, [])
    prelude(sprints, snapshots(sprints.ctx.originals), far=True)
    (given,) = heavy
    assert (given[0].plan, given[2]) == (sprints.plan, "q0"), "nobody could take, so that nobody is behind"


def _took(merged: Merged, **ratios: float) -> Any:
    return prelude_module.Taken(merged, ratios, {})


def _sprints_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sprints, dict[str, Any], Recipe]]:
    """What sprints were begun with, which end as they begin."""
    begun: list[tuple[Sprints, dict[str, Any], Recipe]] = []

    def sprint(now: Sprints, found: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
        begun.append((now, found, recipe))
        return {**found, "rows": ["told"], "rate": recipe.rate}

    monkeypatch.setattr(Sprints, "sprint", sprint)
    return begun


def _heavy_first(monkeypatch: pytest.MonkeyPatch, reached: list[float]) -> list[tuple[Any, ...]]:
    """What was asked of the heaviest sets, which come to these ratios, one after the other, or do not train."""
    asked: list[tuple[Any, ...]] = []

    def first(others: Sprints, *given: Any) -> dict[str, Any]:
        asked.append((others, *given))
        if len(asked) > len(reached):
            return {**given[2], "ratios": {}, "rows": []}
        ratios, step = dict.fromkeys(others.required, reached[len(asked) - 1]), len(asked)
        return {**given[2], "states": {"q0": {"trained": step}}, "ratios": ratios,
                "rows": [{"epoch": step}]}  # fmt: skip

    monkeypatch.setattr(prelude_module, "heavy_first", first)
    return asked
