"""Taking over: the largest model gives as it is, takers begin as a part of it and learn alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import merger.methods.adopting as adopting_module
import merger.methods.top_down as wide_module
from merger.checkpoint import Checkpoint, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.methods.adopting import Adopting
from merger.methods.sprints import Sprints
from merger.outcomes import NO_TIME, all_at_once, outcomes_of
from merger.start.choosing import Start
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from tests.merger.methods.interrupting import stopping


@pytest.fixture
def adopting(ctx: MergeContext, sprints: Sprints) -> Adopting:
    return Adopting(ctx, sprints.plan, sprints.required, sprints.checkpoint, sprints.budget, sprints.recipe)


def taught(monkeypatch: pytest.MonkeyPatch, bearable: int, else_: float = 0.5) -> list[tuple[str, int]]:
    """Let training bring back every query that shares so many layers at most; returns what is tried."""
    tried = []

    def train(ctx: MergeContext, begins: Any, plan: Any, query: str, *_: Any) -> dict[str, Any]:
        count = sum(owner == query for members in plan.shared for owner, _path in members)
        tried.append((query, count))
        ctx.flops.add_flops(1000)
        return {"ratio": 0.99 if count <= bearable else else_, "state": dict(begins[0]), "trained": 1}

    monkeypatch.setattr(adopting_module, "train_private", train)
    return tried


@pytest.mark.parametrize("bearable", [3, 2, 1])
def test_a_query_takes_as_much_as_it_bears(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, bearable: int
) -> None:
    tried, originals = taught(monkeypatch, bearable), snapshots(ctx.originals)
    adopting.checkpoint.meter = ctx.flops
    merged, ratios = adopting.run()
    takers = {"q0", "q2"}
    assert {query for query, _ in tried} == takers, "the largest gives"
    assert ratios == {"q0": 0.99, "q1": 1.0, "q2": 0.99}
    counts = [count for query, count in tried if query == "q0"]
    assert counts[0] == 3 and counts == sorted(counts, reverse=True), "all at first, then less"
    size = {(layer.query, layer.path): layer.bytes for layer in ctx.layers}
    for members in merged.plan.shared:
        assert {query for query, _ in members} == {"q1", *takers}
        weights = [merged.states[query][weight_key(merged.states[query], path)] for query, path in members]
        assert all(torch.equal(weight, originals["q1"][f"{members[0][1]}.weight"]) for weight in weights)
    assert all(torch.equal(merged.states["q1"][key], value) for key, value in originals["q1"].items())
    shared = {path for members in merged.plan.shared for query, path in members if query == "q0"}
    lighter = [size["q0", path] for path in ("stem.0", "body.0", "last.0") if path not in shared]
    assert all(own <= size["q0", path] for own in lighter for path in shared), "the lightest are kept back"
    rows = [row for row in adopting.checkpoint.log if "takes" in row]
    assert len(rows) == len(tried) and all(before["flops"] < after["flops"] for before, after in pairwise(rows))
    saved = [row["accepted_bytes"] for row in rows]
    assert saved == sorted(saved) and saved[-1] == merged.plan.saved_bytes(ctx.layers)


def test_a_taker_begins_as_a_part_of_its_giver_norms_and_head_among_it(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(monkeypatch, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Adopting, "one_question", lambda *_: True)
        giver, merged = ctx.originals["q1"].state_dict(), adopting.run()[0]
    learnt = {key for key, _ in ctx.originals["q0"].named_parameters()}  # statistics of norms are measured again
    assert all(torch.equal(tensor, giver[key]) for key, tensor in merged.states["q0"].items() if key in learnt)
    other = replace(ctx.queries["q1"], classes=("right", "left"))
    monkeypatch.setitem(ctx.queries, "q1", other)
    state = adopting.state("q0", "q1", {"head": "head", "stem.1": "stem.1"}, giver)
    assert torch.equal(state["head.weight"], ctx.originals["q0"].state_dict()["head.weight"]), "other classes"
    assert torch.equal(state["stem.1.weight"], giver["stem.1.weight"])


@pytest.mark.parametrize("change", [{"wide": "linear of the same shape"}, {"head": True}])
def test_only_layers_of_one_signature_are_shared_and_no_heads(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    taught(monkeypatch, 3)
    layers = [
        replace(layer, **change) if (layer.query, layer.path) == ("q1", "stem.0") else layer for layer in ctx.layers
    ]
    monkeypatch.setattr(ctx, "layers", layers)
    shared = {member for members in adopting.run()[0].plan.shared for member in members}
    assert ("q0", "last.0") in shared and ("q0", "stem.0") not in shared


def test_who_nearly_is_there_trains_once_more_and_who_takes_nothing_stays_as_it_is(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, originals = taught(monkeypatch, 0, 0.94), snapshots(ctx.originals)
    merged, ratios = adopting.run()
    assert not merged.plan.shared and set(ratios.values()) == {1.0}
    assert tried[:2] == [("q0", 3), ("q0", 3)]
    for query, state in originals.items():
        assert all(torch.equal(merged.states[query][key], value) for key, value in state.items())
    assert {row["query"] for row in adopting.checkpoint.log if row.get("repair") == "leaves"} == {"q0", "q2"}


@pytest.mark.parametrize(("reached", "slower"), [(0.5, [1, 4]), (0.94, [1, 2, 16, 32, 64, 128])])
def test_layers_of_its_own_learn_the_slower_the_nearer_a_query_is_and_the_oftener_it_was_tried(
    adopting: Adopting, monkeypatch: pytest.MonkeyPatch, reached: float, slower: list[int]
) -> None:
    rates: list[float] = []

    def train(_ctx: MergeContext, begins: Any, _plan: Any, query: str, recipe: Recipe, *_: Any) -> dict[str, Any]:
        if query == "q0":
            rates.append(recipe.rate)
        return {"ratio": reached, "state": dict(begins[0]), "trained": 1}

    monkeypatch.setattr(adopting_module, "train_private", train)
    adopting.run()
    assert [rates[0] / rate for rate in rates] == pytest.approx(slower)


@pytest.mark.parametrize("bearable", [3, 1, 0])
def test_the_log_says_of_every_layer_why_it_is_not_taken(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, bearable: int
) -> None:
    taught(monkeypatch, bearable)
    merged, _ = adopting.run()
    log = adopting.checkpoint.log
    sets = [tuple((query, path) for query, path in members) for members in log[-1]["sets"]]
    trials = all_at_once(sets, log, adopting.required, 1.0)
    size = {(layer.query, layer.path): layer.bytes for layer in ctx.layers}
    rows = outcomes_of(trials, merged.plan, size, {})
    assert sum(row["saved_bytes"] for row in rows) == merged.plan.saved_bytes(ctx.layers)
    shared = {member for members in merged.plan.shared for member in members}
    for trial in trials:
        missing = {query for query, path in trial.members if (query, path) not in shared} - {"q1"}
        assert missing == trial.in_the_way.keys() and all(why["ratio"] == 0.5 for why in trial.in_the_way.values())


def test_an_interrupted_one_goes_on_where_it_stood(
    adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = replace(adopting, checkpoint=Checkpoint(tmp_path / "whole", {}, False))
    tried = taught(monkeypatch, 2)
    wanted, ratios = whole.run()
    calls, go_on = len(tried), stopping(monkeypatch, adopting_module, tried, 3)
    with pytest.raises(KeyboardInterrupt):
        adopting.run()
    adopting.checkpoint.write()
    go_on()
    again = replace(adopting, checkpoint=Checkpoint(adopting.checkpoint.folder, {}, True))
    merged, found = again.run()
    assert len(tried) == 2 * calls and (merged.plan, found) == (wanted.plan, ratios)
    kept = [row for row in whole.checkpoint.log if "sets" not in row]
    assert [row.get("ratio") for row in again.checkpoint.log if "sets" not in row] == [row["ratio"] for row in kept]


def test_without_work_nothing_is_taken(adopting: Adopting, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = taught(monkeypatch, 3)
    poor = replace(adopting, budget=Budget(ctx.flops, 1.0))
    ctx.flops.add_flops(1)
    assert not poor.run()[0].plan.shared and not tried
    assert ctx.flops.total == 1.0, "nor is anybody judged"
    assert {row["after"] for row in adopting.checkpoint.log if "repair" in row} == {NO_TIME}


def test_an_epoch_is_as_long_as_data_and_work_allow(adopting: Adopting, ctx: MergeContext) -> None:
    def frames(max_flops: float, least: int) -> int:
        recipe = replace(adopting.recipe, frames_per_epoch=least)
        bounded = replace(adopting, budget=Budget(ctx.flops, max_flops), recipe=recipe)
        return (bounded._recipe("q0", ["q0", "q2"], 1) or {})["frames_per_epoch"]

    most = len(ctx.train["q0"])
    assert frames(math.inf, 512) == most and frames(math.inf, 2) == 32 < most
    once = adopting.recipe.epochs * ctx.flops.of(ctx.queries["q0"])
    enough = once * (len(ctx.val["q0"]) + 4 * 20)
    assert frames(ctx.flops.total + 6.1 * enough, 16) == 20, "a third of what is its own, which is a half"
    assert frames(ctx.flops.total + enough, 16) == 16
    with pytest.raises(KeyError):
        frames(ctx.flops.total + 1.0, 16)


def test_a_model_really_becomes_a_part_of_another(adopting: Adopting, ctx: MergeContext) -> None:
    quick = replace(adopting, recipe=replace(adopting.recipe, epochs=3), required=dict.fromkeys(ctx.queries, 0.8))
    merged, ratios = quick.run()
    assert merged.plan.shared and all(ratios[query] >= 0.8 for query in merged.plan.queries())
    models = ctx.models(merged.plan.queries(), merged.states, merged.plan)
    assert all(
        ctx.ratio(query, model) == pytest.approx(ratios[query]) for query, model in models.items() if query != "q1"
    )


def test_where_nothing_is_left_of_any_query_no_joint_training_begins(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, apart = taught(monkeypatch, 3), snapshots(ctx.originals)
    lost = Start(apart, dict.fromkeys(ctx.queries, 0.92), apart, far=True)
    assert lost.shattered and not replace(lost, errors={**lost.errors, "q0": 0.5}).shattered
    assert not replace(lost, related=True).shattered, "what is related comes back"
    monkeypatch.setattr(wide_module, "choose_start", lambda *_: lost)
    monkeypatch.setattr(Sprints, "sprint", lambda *_: pytest.fail("a sprint began"))
    found = wide_module._trained(sprints, sprints.plan, choose_rate=True)
    assert tried and found.plan.queries() == set(ctx.queries) and found.won.plan == found.plan
    assert set(found.ratios) == found.plan.queries()


@pytest.mark.parametrize(
    ("theirs", "solved", "shattered"), [(0.97, 0.92, True), (0.97, 0.5, False), (0.7, None, False)]
)
def test_whether_anything_is_left_is_seen_once_it_is_solved(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch,
    theirs: float, solved: float | None, shattered: bool,
) -> None:  # fmt: skip
    apart, solving = snapshots(ctx.originals), list[bool]()

    def choose(_ctx: object, _plan: object, _journal: object, _apart: object, _most: float, solves: bool) -> Start:
        solving.append(solves)
        errors = {query: 0.5 if query == "q0" else theirs for query in ctx.queries}
        return Start(apart, dict.fromkeys(errors, solved or 0.0) if solves else errors, apart, far=True)

    monkeypatch.setattr(wide_module, "choose_start", choose)
    found = wide_module._start(sprints, again=True)
    assert solving == [False, True][: 2 if solved else 1], "who gave its weights keeps much of its own"
    assert ("shattered" in found) == shattered and "states" not in found


def test_where_a_sprint_loses_all_queries_they_take_from_each_other(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, apart = taught(monkeypatch, 3), snapshots(ctx.originals)
    ratios = dict.fromkeys(ctx.queries, 0.5)
    begins = {"waits": {}, "apart": apart, "own": apart, "states": apart, "ratios": ratios}
    monkeypatch.setattr(wide_module, "_start", lambda *_, **__: begins)
    monkeypatch.setattr(
        wide_module,
        "prelude",
        lambda *_, **__: {"won": Merged(SharingPlan(), {}).to_plain(), "states": {}, "tied": SharingPlan().to_json()},
    )
    monkeypatch.setattr(Sprints, "sprint", lambda _self, found, *_: {**found, "rows": []})
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    monkeypatch.setattr(Sprints, "_with_deep_layers", lambda self, found, _sprint: self._won(found))
    found = wide_module._trained(sprints, sprints.plan, choose_rate=False)
    assert tried and found.plan.queries() == set(ctx.queries) and found.sprints == 1
