"""Taking deep layers: what a query keeps to itself, who gives, what the log says, and how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import merger.methods.deep as deep_module
import merger.methods.top_down as wide_module
from merger.checkpoint import Checkpoint, StepCache, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.probing import HEAD_FRAMES
from merger.mending.private import GENTLE
from merger.methods.deep import RANKING, SLOWER, TAKES, Deep
from merger.methods.harm import PASSES, SETTLING, harms
from merger.methods.sprints import Sprints, Trained
from merger.outcomes import NO_TIME, all_at_once, outcomes_of
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan
from tests.merger.methods.interrupting import stopping
from tests.merger.options import QUICK

KEPT = (1 / 16, 1 / 2, 9 / 10)
"""Parts of the tiny network's bytes that end between its layers: its first, its first two, or all but its last."""


@pytest.fixture
def deep(ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch) -> Deep:
    monkeypatch.setattr(deep_module, "KEPT", KEPT)
    return Deep(ctx, sprints.plan, sprints.required, sprints.checkpoint, sprints.budget, sprints.recipe)


def took(deep: Deep, *takers: str) -> tuple[Merged, Mapping[str, float], list[dict[str, Any]]]:
    """What comes of it when these take from q0."""
    own = snapshots(deep.ctx.originals)
    found = deep.run(Merged(SharingPlan(), {"q0": own["q0"]}), own, takers)
    ratios = {row["takes"]: row["ratio"] for row in found["rows"] if row.get("accepted")}
    return Merged.from_plain(found["merged"]), ratios, found["rows"]


def taught(monkeypatch: pytest.MonkeyPatch, bearable: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Let training bring back every query that shares so many layers at most; returns whom it trained, what it shared,
    and how many beginnings it had.
    """
    tried = []

    def train(ctx: MergeContext, begins: Any, plan: SharingPlan, query: str, *_: Any) -> dict[str, Any]:
        count = sum(owner == query for members in plan.shared for owner, _path in members)
        tried.append((query, count, len(begins)))
        ctx.flops.add_flops(1000)
        state = {**begins[-1], "head.bias": torch.full((2,), float(count))}
        return {"ratio": 0.99 if count <= bearable[query] else 0.5, "state": state, "trained": 1}

    monkeypatch.setattr(deep_module, "train_private", train)
    return tried


def test_a_shared_weight_harms_where_it_is_another(ctx: MergeContext, merged: Merged) -> None:
    own = snapshots(ctx.originals)["q1"]
    paths = ["stem.0", "body.0", "last.0"]
    assert harms(ctx, "q1", own, own, paths) == dict.fromkeys(paths, 0.0)
    found = harms(ctx, "q1", own, {**own, "body.0.weight": merged.states["q1"]["body.0.weight"]}, paths)
    assert found["body.0"] > 0 and found["stem.0"] == found["last.0"] == 0
    before = ctx.flops.total
    harms(ctx, "q1", own, own, paths)
    frames, one = len(ctx.train["q1"]), ctx.flops.of(ctx.queries["q1"])
    passes = 3 * (2 * min(frames, HEAD_FRAMES) + min(frames, SETTLING)) + min(frames, HEAD_FRAMES)
    assert ctx.flops.total - before == pytest.approx(passes * one), "the original answers once"


def test_what_harms_most_for_its_bytes_is_kept_and_no_more_than_the_part(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = deep.takeable("q1")
    worst = {"stem.0": 1.0 * size["stem.0"], "body.0": 9.0 * size["body.0"], "last.0": 4.0 * size["last.0"]}
    monkeypatch.setattr(deep_module, "harms", lambda *_: worst)
    own = snapshots(deep.ctx.originals)["q1"]
    steps = deep._kept("q1", own, own, list(size))
    assert steps[-1] == ("body.0", "stem.0"), "the last one is more than what is left"
    assert sorted({*steps}, key=steps.index) == steps, "none twice"
    for part, step in zip(KEPT[-len(steps) :], steps, strict=True):
        assert sum(size[path] for path in step) <= part * sum(size.values())


def test_where_little_work_is_left_the_first_layers_count_as_the_most_harmful(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ctx = snapshots(deep.ctx.originals)["q1"], deep.ctx
    paths = ["last.0", "stem.0", "body.0"]
    enough = 3 * PASSES * ctx.flops.of(ctx.queries["q1"]) / RANKING
    monkeypatch.setattr(deep_module, "harms", lambda *_: {"stem.0": 0.0, "body.0": 1e9, "last.0": 1.0})
    for left, first in ((0.99 * enough, "stem.0"), (1.01 * enough, "body.0")):
        bounded = replace(deep, budget=Budget(ctx.flops, ctx.flops.total + left))
        assert bounded._worst("q1", own, own, paths)[0] == first


@pytest.mark.parametrize("bears", [3, 1, 0])
def test_where_only_the_fewest_layers_are_asked_for_no_more_are_tried_and_no_row_says_what_is_kept(
    deep: Deep, monkeypatch: pytest.MonkeyPatch, bears: int
) -> None:
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [(), ("stem.0",), ("stem.0", "body.0")])
    tried = taught(monkeypatch, {"q1": bears})
    merged, _, rows = took(replace(deep, fewest=True), "q1")
    assert [count for _, count, _ in tried] == [1]
    assert [("takes" in row, row.get("accepted")) for row in rows] == [(True, bears > 0)]
    assert len(merged.plan.shared) == min(bears, 1)


@pytest.mark.parametrize(("bears", "tries"), [(3, [1, 3]), (2, [1, 3, 2]), (1, [1, 3, 2]), (0, [1, 1])])
def test_a_query_keeps_as_little_as_it_needs(
    deep: Deep, monkeypatch: pytest.MonkeyPatch, bears: int, tries: list[int]
) -> None:
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [(), ("stem.0",), ("stem.0", "body.0")])
    tried = taught(monkeypatch, {"q1": bears})
    merged, ratios, rows = took(deep, "q1")
    assert [count for _, count, _ in tried] == tries
    assert sum(len(members) == 2 for members in merged.plan.shared) == bears and set(ratios) == (
        {"q1"} if bears else set()
    )
    taken = [row for row in rows if "takes" in row]
    assert [row["accepted"] for row in taken] == [count <= bears for count in tries]
    accepted = [row["accepted_bytes"] for row in taken]
    assert accepted == sorted(accepted) and accepted[-1] == merged.plan.saved_bytes(deep.ctx.layers)
    said = [row for row in rows if "repair" in row]
    assert [row["repair"] for row in said] == ([TAKES] if bears < 3 else [])
    if said:
        assert len(said[0]["private"]) == 3 - bears and said[0]["ratio"] == 0.5, "why no more was taken"
        assert said[0]["after"] == f"taking {bears + 1} of 3 layers", "the least that was too much"


@pytest.mark.parametrize("slow_bears", [0, 1, 2])
def test_whom_the_rate_ruins_is_tried_once_more_at_a_far_lower_one_and_keeps_to_it(
    deep: Deep, monkeypatch: pytest.MonkeyPatch, slow_bears: int
) -> None:
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [("stem.0",), ("stem.0", "body.0")])
    rates = []

    def train(_b: MergeContext, begins: Any, plan: SharingPlan, query: str, recipe: Recipe, *_: Any) -> dict[str, Any]:
        count = sum(owner == query for members in plan.shared for owner, _path in members)
        rates.append(recipe.rate)
        slow = recipe.rate < deep.recipe.rate  # type: ignore[union-attr]
        ratio = 0.99 if slow and count <= slow_bears else 0.5
        return {"ratio": ratio, "state": begins[-1], "trained": 8 if slow else 0}

    monkeypatch.setattr(deep_module, "train_private", train)
    merged, _, rows = took(deep, "q1")
    usual = rates[0]
    assert rates == [usual, SLOWER * usual] + [SLOWER * usual] * (slow_bears > 0)
    assert sum(len(members) == 2 for members in merged.plan.shared) == slow_bears
    assert [row["rate"] for row in rows if "takes" in row] == [pytest.approx(GENTLE * rate) for rate in rates]


def test_what_it_learnt_with_more_of_its_own_is_a_beginning_too(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [("stem.0",), ("stem.0", "body.0")])
    tried = taught(monkeypatch, {"q1": 2})
    merged, _, _ = took(deep, "q1")
    assert [begins for _, _, begins in tried] == [1, 2]
    assert merged.states["q1"]["head.bias"][0] == tried[-1][1], "what was learnt last"
    for members in merged.plan.shared:
        values = [merged.states[query][f"{path}.weight"] for query, path in members]
        assert all(torch.equal(values[0], value) for value in values)


def test_the_others_stay_as_they_are_and_the_query_has_what_is_required(deep: Deep) -> None:
    merged, ratios, _ = took(replace(deep, required=dict.fromkeys(deep.ctx.queries, 0.9)), "q1", "q2")
    own = snapshots(deep.ctx.originals)
    assert all(torch.equal(merged.states["q0"][name], tensor) for name, tensor in own["q0"].items())
    assert ratios and all(ratio >= 0.9 for ratio in ratios.values())
    for query in ratios:
        model = deep.ctx.models([query], merged.states, merged.plan)[query]
        assert deep.ctx.ratio(query, model) == pytest.approx(ratios[query])


def test_without_a_recipe_nothing_is_trained_and_it_takes_what_it_bears_as_it_is(
    deep: Deep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_module, "train_private", lambda *_: pytest.fail("nothing is to be trained"))
    as_it_is = replace(deep, recipe=None)
    monkeypatch.setattr(deep.ctx, "ratio", lambda _query, model: 0.96 if _shares(deep, model) < 3 else 0.5)
    merged, ratios, rows = took(as_it_is, "q1")
    assert ratios == {"q1": 0.96} and 0 < len(merged.plan.shared) < 3
    assert all(row["epochs"] == 0 for row in rows if "takes" in row)
    unable = replace(as_it_is, budget=Budget(deep.ctx.flops, 0.0), checkpoint=StepCache())
    assert not took(unable, "q1")[1], "no work is left to judge anything"


def bearing(monkeypatch: pytest.MonkeyPatch, bearable: Mapping[str, int], stop: int = 0) -> list[tuple[str, int]]:
    """Let every query bear so many layers at most as they are; returns whom was judged with how many. Interrupted when
    so many were.
    """
    tried = list[tuple[str, int]]()

    def evaluated(_deep: Deep, query: str, plan: SharingPlan, begins: Any, recipe: Any) -> dict[str, Any]:
        count = sum(owner == query for members in plan.shared for owner, _path in members)
        tried.append((query, count))
        if len(tried) == stop:
            raise KeyboardInterrupt
        return {"ratio": 0.99 if count <= bearable[query] else 0.5, "state": begins[-1], "trained": 0}

    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [(), ("stem.0",), ("stem.0", "body.0")])
    monkeypatch.setattr(deep_module.Deep, "_judged", evaluated)
    return tried


def test_without_a_recipe_all_take_the_fewest_first_and_then_more_in_their_turns(
    deep: Deep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bears = {"q1": 2, "q2": 3}
    tried = bearing(monkeypatch, bears)
    as_it_is = replace(deep, recipe=None, checkpoint=StepCache())
    merged, _, rows = took(as_it_is, "q1", "q2")
    assert tried == [("q1", 1), ("q2", 1), ("q1", 3), ("q2", 3), ("q1", 2)]
    assert sorted(len(members) for members in merged.plan.shared) == [2, 3, 3]
    assert [row["query"] for row in rows if "repair" in row] == ["q1"], "q2 keeps nothing to itself"
    bearing(monkeypatch, bears, stop=4)
    stopped = Checkpoint(tmp_path / "stopped", {}, False)
    with pytest.raises(KeyboardInterrupt):
        took(replace(as_it_is, checkpoint=stopped), "q1", "q2")
    stopped.write()
    after = bearing(monkeypatch, bears)
    again, _, same = took(replace(as_it_is, checkpoint=Checkpoint(stopped.folder, {}, True)), "q1", "q2")
    assert after == tried[3:] and again.plan == merged.plan
    assert [row.get("takes") for row in same] == [row.get("takes") for row in rows]


def test_who_took_the_fewest_goes_on_from_there(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, own = bearing(monkeypatch, {"q1": 2, "q2": 3}), snapshots(deep.ctx.originals)
    standing, takers = Merged(SharingPlan(), {"q0": own["q0"]}), ["q1", "q2"]
    found = replace(deep, recipe=None, checkpoint=StepCache(), fewest=True).run(standing, own, takers)
    assert tried == [("q1", 1), ("q2", 1)]
    deep = replace(deep, recipe=None, checkpoint=StepCache())
    more = deep.run(Merged.from_plain(found["merged"]), own, takers, found["taking"])
    assert tried[2:] == [("q1", 3), ("q2", 3), ("q1", 2)]
    assert sorted(len(members) for members in Merged.from_plain(more["merged"]).plan.shared) == [2, 3, 3]


def test_what_is_known_of_the_same_layers_is_not_found_out_again(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, own = bearing(monkeypatch, {"q1": 0, "q2": 3}), snapshots(deep.ctx.originals)
    standing, takers = Merged(SharingPlan(), {"q0": own["q0"]}), ["q1", "q2"]
    known = replace(deep, recipe=None, checkpoint=StepCache(), fewest=True).run(standing, own, takers)["taking"]
    ranked = list[str]()
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda _deep, query, *_: ranked.append(query))
    found = replace(deep, recipe=None, checkpoint=StepCache()).run(standing, own, takers, known)
    assert not ranked and tried == [("q1", 1), ("q2", 1), ("q2", 1), ("q2", 3)]
    assert Merged.from_plain(found["merged"]).plan.queries() == {"q0", "q2"}
    other = Merged(SharingPlan(), {"q2": own["q2"]})
    bearing(monkeypatch, {"q1": 3}).clear()
    again = replace(deep, recipe=None, checkpoint=StepCache()).run(other, own, ["q1"], known)
    assert Merged.from_plain(again["merged"]).plan.queries() == {"q1", "q2"}, "of another giver nothing is known"


def test_what_others_took_of_it_a_query_keeps_when_it_takes_more(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(deep.plan, shared=tuple(
        tuple(member for member in members if member != ("q0", "stem.0")) for members in deep.plan.shared
    ))  # fmt: skip
    as_it_is = replace(deep, recipe=None, plan=plan)
    monkeypatch.setattr(deep_module.Deep, "_kept", lambda *_: [(), ("body.0",)])
    monkeypatch.setattr(deep_module.Deep, "_judged", lambda _deep, _query, _plan, begins, _recipe: {
        "ratio": 0.99, "state": begins[-1], "trained": 0})  # fmt: skip
    merged, ratios, _ = took(as_it_is, "q1", "q2")
    assert set(merged.plan.shared) == set(plan.shared) and set(ratios) == {"q1", "q2"}
    for members in merged.plan.shared:
        values = [merged.states[query][f"{path}.weight"] for query, path in members]
        assert all(torch.equal(values[0], value) for value in values)


def _shares(deep: Deep, model: torch.nn.Module) -> int:
    """How many layers of a model of q1 are q0's."""
    theirs = deep.ctx.originals["q0"]
    paths = ("stem.0.weight", "body.0.weight", "last.0.weight")
    return sum(torch.equal(model.get_parameter(path), theirs.get_parameter(path)) for path in paths)


def test_who_learns_to_stand_trains_all_it_has_and_gives_once_it_has_what_is_required(
    deep: Deep, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = deep.stand("q1", ["q1"], merged.states["q1"])
    assert found["row"]["alone"] == "q1" and found["row"]["ratio"] >= 0.95
    assert deep.ctx.ratio("q1", deep.ctx.models(["q1"], {"q1": found["state"]})["q1"]) >= 0.95
    over = replace(deep, budget=Budget(deep.ctx.flops, 0.0), checkpoint=StepCache())
    assert over.stand("q1", ["q1"], merged.states["q1"])["state"] is None
    monkeypatch.setattr(deep_module, "train_private", lambda _b, begins, *_: {
        "ratio": 0.94, "state": begins[0], "trained": 8})  # fmt: skip
    below = replace(deep, checkpoint=StepCache()).stand("q1", ["q1"], merged.states["q1"])
    assert below["state"] is None and below["row"]["ratio"] == 0.94


def test_who_takes_nothing_gives_to_those_that_follow(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SharingPlan((
        (("q0", "stem.0"), ("q1", "stem.0"), ("q2", "stem.0")), (("q1", "last.0"), ("q2", "last.0")),
    ))  # fmt: skip
    monkeypatch.setattr(deep_module, "KEPT", (0.0,))
    taught(monkeypatch, {"q1": 0, "q2": 2})
    merged, ratios, _ = took(replace(deep, plan=plan), "q1", "q2")
    assert set(ratios) == {"q2"}
    assert set(merged.plan.shared) == {(("q0", "stem.0"), ("q2", "stem.0")), (("q1", "last.0"), ("q2", "last.0"))}


def test_out_of_work_nothing_begins_and_that_is_what_the_log_says(deep: Deep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_module, "train_private", lambda *_: pytest.fail("no work is left"))
    merged, ratios, rows = took(replace(deep, budget=Budget(deep.ctx.flops, 0.0)), "q1")
    assert not merged.plan.shared and not ratios
    assert [(row["after"], row["ratio"], len(row["private"])) for row in rows] == [(NO_TIME, None, 3)]


def test_an_interrupted_one_goes_on_where_it_stood(deep: Deep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = replace(deep, checkpoint=Checkpoint(tmp_path / "whole", {}, False))
    tried = taught(monkeypatch, {"q1": 2, "q2": 1})
    wanted, ratios, rows = took(whole, "q1", "q2")
    calls, go_on = len(tried), stopping(monkeypatch, deep_module, tried, 2)
    with pytest.raises(KeyboardInterrupt):
        took(deep, "q1", "q2")
    deep.checkpoint.write()
    go_on()
    again = replace(deep, checkpoint=Checkpoint(deep.checkpoint.folder, {}, True))
    merged, found, after = took(again, "q1", "q2")
    assert len(tried) == 2 * calls and (merged.plan, found) == (wanted.plan, ratios)
    without = lambda rows: [{key: row[key] for key in row if key != "flops"} for row in rows]  # noqa: E731
    assert without(after) == without(rows)


@pytest.mark.parametrize("bears", [True, False])
def test_who_left_a_training_shares_what_it_bears_of_what_came_of_it(
    ctx: MergeContext, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bears: bool
) -> None:
    monkeypatch.setattr("merger.methods.deep.KEPT", (9 / 10,))
    others, own = merged.plan.without("q1"), snapshots(ctx.originals)
    ratios = {"q0": 0.99, "q2": 0.99}
    states = {query: merged.states[query] for query in ratios}
    trained = Trained(others, states, ratios, Recipe(), (), 1, Merged(SharingPlan(), {}), own=own)
    monkeypatch.setattr(wide_module, "_trained", lambda *_: trained)
    monkeypatch.setattr("merger.methods.deep.train_private", lambda _b, begins, *_: {
        "state": begins[-1], "ratio": 0.99 if bears else 0.5, "trained": 1})  # fmt: skip
    checkpoint = Checkpoint(tmp_path / "kept", {}, False)
    checkpoint.add_row(
        {"query": "q1", "repair": "leaves", "after": "sprint 1", "ratio": 0.6, "required": 0.95, "flops": 1}
    )
    found = wide_module.wide(ctx, QUICK, checkpoint)
    assert ("q1" in found.plan.queries()) == bears and found.plan.without("q1") == others
    trials = all_at_once(merged.plan.shared, checkpoint.log, {"q1": 0.95}, 1.0)
    sizes = {(layer.query, layer.path): layer.bytes for layer in ctx.layers}
    told = outcomes_of(trials, found.plan, sizes, {})
    assert sum("q1" in row["in_the_way"] for row in told) == (2 if bears else 3)
