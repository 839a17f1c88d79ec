"""Method `wide`: that it reaches the ceiling, who waits, and what is given up when all come to less."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import merger.methods.sprints as sprints_module
import merger.methods.top_down as wide_module
from merger import merge
from merger.checkpoint import Checkpoint, State, StepCache, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions
from merger.core.snapshot import training_flops
from merger.mending.search import Case
from merger.mending.several import mend_all
from merger.methods.prelude import heaviest
from merger.methods.sprints import Sprints, Trained
from merger.methods.top_down import whole_plan, wide
from merger.outcomes import BACK, all_at_once
from merger.start.choosing import Start, donated
from merger.training.recipe import Recipe
from models.sharing.groups import ceiling_bytes
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.surely import must_train

OPTIONS = MergeOptions(Recipe(rate=1e-3, epochs=2), choose_rate=False, precision="fp32")


@pytest.fixture
def nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody bear any deep layer of another."""
    nothing = Merged(SharingPlan(), {}).to_plain()
    found = {"won": nothing, "states": {}, "tied": SharingPlan().to_json()}
    monkeypatch.setattr(wide_module, "prelude", lambda *_, **__: found)
    monkeypatch.setattr(Sprints, "took", lambda *_, **__: {"merged": nothing, "rows": [], "taking": {}})


def test_the_whole_plan_saves_the_ceiling(ctx: MergeContext) -> None:
    plan = whole_plan(ctx, OPTIONS)
    assert plan.saved_bytes(ctx.layers) == ceiling_bytes(ctx.layers) > 0


@pytest.mark.usefixtures("nobody_takes")
def test_wide_reaches_the_ceiling_on_a_tiny_workload(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_train(monkeypatch)
    report = merge(workload, tmp_path / "b.gemel", "top-down", options=OPTIONS)
    assert report.method == "top-down" and report.saved_fraction == pytest.approx(report.ceiling_fraction, rel=1e-3)
    assert all(query.ratio > 0.8 for query in report.queries) and report.flops > 0
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    assert rows[0]["sprint"] == 1 and set(rows[0]["ratios"]) == {"q0", "q1", "q2"}


def test_what_was_tried_alone_in_vain_is_not_tried_again_as_a_repair(
    ctx: MergeContext, merged: Merged, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"states": merged.states, "ratios": {"q0": 1.0, "q1": 0.94, "q2": 0.92}, "rows": []}
    in_vain = {"ratio": 0.9, "epochs": 2}
    for module in ("merger.methods.sprints", "merger.mending.search"):
        monkeypatch.setattr(f"{module}.train_private", lambda _b, begins, *_: {"state": begins[0], **in_vain})
    assert sprints._alone(found, last=True)["alone"] == ["q1", "q2"]
    alone = sprints._alone(found, last=False)["alone"]
    assert alone == ["q1"], "the nearest; where it fails all train again"
    budget = Budget(ctx.flops)
    cases = [Case(q, ratio, sprints.required[q], Recipe(), q in alone) for q, ratio in found["ratios"].items()]
    _, rows = mend_all(ctx, merged, cases, StepCache(), budget)
    tried = {query: [row["repair"] for row in rows if row["query"] == query] for query in ("q1", "q2")}
    assert tried["q2"][0] == "norms and head" and len(tried["q2"]) - 1 == len(tried["q1"]) > 1
    passed: list[Case] = []
    trained = Trained(sprints.plan, found["states"], found["ratios"], Recipe(), alone, 1, Merged(SharingPlan(), {}))
    monkeypatch.setattr(wide_module, "_trained", lambda *_: trained)
    monkeypatch.setattr(wide_module, "mend_all", lambda _b, m, given, *_: passed.extend(given) or (m, []))
    wide(ctx, OPTIONS, sprints.checkpoint)
    assert [case.query for case in passed if case.alone] == alone and len(passed) == 3


def test_a_workload_without_common_layers_keeps_its_originals(ctx: MergeContext) -> None:
    said = []
    ctx.progress = lambda event, **fields: said.append(fields.get("text", ""))
    options = MergeOptions(Recipe(), min_saving=1.0)
    merged = wide(ctx, options, SimpleNamespace(seconds=0.0))  # type: ignore[arg-type]
    assert not merged.plan.shared and any("nothing is shared" in text for text in said)


def _same(ctx: MergeContext, one: str, other: str) -> None:
    ctx.originals[other].load_state_dict(ctx.originals[one].state_dict(), strict=False)  # q1 has a layer more


def test_models_that_are_equal_are_shared_as_they_are_and_train_nothing(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same(ctx, "q0", "q1")
    _same(ctx, "q0", "q2")
    told: dict[str, dict] = {}
    ctx.progress = lambda event, **fields: told.update({event: fields})
    monkeypatch.setattr(wide_module, "_trained", lambda *_: pytest.fail("there is nothing to train"))
    checkpoint = Checkpoint(tmp_path / "flops", {}, False)
    merged = wide(ctx, OPTIONS, checkpoint)
    assert merged.plan == whole_plan(ctx, OPTIONS) and ctx.flops.total == 0
    for query, model in ctx.originals.items():
        assert all(torch.equal(merged.states[query][key], tensor) for key, tensor in model.state_dict().items())
    assert told["equal"]["settled"] == ["q0", "q1", "q2"] and "stages" not in told
    sets = wide_module._sets_tried(ctx, OPTIONS, checkpoint.log, 0.0)
    assert {one.members for one in sets} == set(merged.plan.shared) and not any(one.flops for one in sets)


def test_who_ends_with_nothing_shared_gets_its_original_back_and_shares_what_is_equal(
    ctx: MergeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same(ctx, "q0", "q1")
    whole = whole_plan(ctx, OPTIONS)
    spoiled = {
        query: {key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()}
        for query, model in ctx.originals.items()
    }
    nothing = Merged(SharingPlan(), spoiled)
    monkeypatch.setattr(wide_module, "_merged", lambda _b, plan, recipe, *_: (nothing, recipe))
    merged = wide(ctx, OPTIONS, Checkpoint(tmp_path / "flops", {}, False))
    assert merged.plan.queries() == {"q0", "q1"} and len(merged.plan.shared) == len(whole.shared)
    for query, model in ctx.originals.items():
        assert all(torch.equal(merged.states[query][key], tensor) for key, tensor in model.state_dict().items())
    joined = Merged(whole.without("q0"), spoiled)  # q1 went with q2, and has no equal any more
    monkeypatch.setattr(wide_module, "_merged", lambda _b, plan, recipe, *_: (joined, recipe))
    merged = wide(ctx, OPTIONS, Checkpoint(tmp_path / "other", {}, False))
    assert merged.plan == joined.plan, "as much is saved as by what is equal"
    assert merged.states["q1"] is spoiled["q1"] and bool(merged.states["q0"]["head.weight"].any())


def _start_of_q0(
    ctx: MergeContext, plan: SharingPlan, _journal: StepCache, apart: Mapping[str, State] | None, *_: object
) -> Start:
    models = dict(apart or snapshots(ctx.originals))
    return Start(donated(plan, models, "q0"), dict.fromkeys(plan.queries(), 0.5), models)


def _judged_by(ratios: Callable[[list[str]], dict[str, float]]) -> Callable:
    """What ties models, of which these ratios are said on val."""
    return lambda ctx, _journal, plan, queries, states: (ctx.models(queries, states, plan), ratios(queries))


def _waits(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, after: Mapping[str, float]) -> SimpleNamespace:
    """Let q1 wait, and a sprint of the others come to the ratios given.

    What is `trained` and how, within which work (`bounds`), and who was, of those a start is made of (`marked`).
    """
    trained, budget, marked = [], [], []
    states = snapshots(ctx.originals)
    half = dict.fromkeys(ctx.queries, 0.5)

    def sprint(sprints: Sprints, found: dict, recipe: Recipe, easing: bool) -> dict:
        trained.append((sorted(sprints.plan.queries()), recipe.epochs, recipe.rate, easing))
        budget.append(sprints.budget.max_flops)
        ratios = {query: after[query] if "q1" not in found["ratios"] else 0.9 for query in found["ratios"]}
        marked = {query: {**found["states"][query], "head.bias": torch.full((2,), len(trained))} for query in ratios}
        return {**found, "rows": [], "ratios": ratios, "states": marked}

    def start(_ctx: object, _plan: object, _journal: object, apart: Mapping[str, State], *_: object) -> Start:
        marked.append([query for query, state in apart.items() if set(state["head.bias"].tolist()) == {1.0}])
        return Start(dict(apart), half, dict(apart))

    begins = {"waits": {"q1": 0.95}, "apart": states, "own": states}
    monkeypatch.setattr(wide_module, "_start", lambda *_, **__: begins)
    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(wide_module, "choose_start", start)
    return SimpleNamespace(trained=trained, budget=budget, marked=marked)


@pytest.mark.usefixtures("nobody_takes")
def test_the_others_are_merged_and_accepted_before_who_waits_joins_them(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _waits(ctx, monkeypatch, {"q0": 0.96, "q2": 0.97})
    monkeypatch.setattr(wide_module, "tied_and_judged", _judged_by(lambda queries: dict.fromkeys(queries, 0.94)))
    monkeypatch.setattr(sprints_module, "train_private", lambda _b, begins, *_: {
        "state": begins[0], "ratio": 0.9, "epochs": 1})  # fmt: skip
    sprints = replace(sprints, budget=Budget(ctx.flops, 1e15))
    found = wide_module._trained(sprints, sprints.plan, False)
    accepted = found.won
    assert seen.marked == [[], ["q0", "q2"]], "it joins what was made of them"
    assert seen.budget == [0.5e15, 1e15, 1e15, 1e15], "half of the work is kept for when it joins"
    both = ["q0", "q1", "q2"]
    rate = sprints.recipe.rate
    assert seen.trained[0] == (["q0", "q2"], 8, rate, False)
    assert seen.trained[1:] == [(both, 3, rate, True), (both, 8, rate / 2, True), (both, 16, rate / 4, True)]
    others = sprints.plan.without("q1")
    assert accepted.plan == others and set(accepted.states) == {"q0", "q2"} and found.sprints == 4
    assert all(int(state["head.bias"][0]) == 1 for state in accepted.states.values()), "before it joined"
    waits, row, *_ = sprints.checkpoint.log
    assert (waits["waits"], waits["lost"]) == ("q1", 0.95)
    assert row["accepted_bytes"] == others.saved_bytes(ctx.layers) > 0


@pytest.mark.usefixtures("nobody_takes")
def test_who_is_lost_among_the_others_waits_too_and_what_is_left_is_accepted(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _waits(ctx, monkeypatch, {"q0": 0.97, "q2": 0.5})
    evaluated: list[list[str]] = []
    monkeypatch.setattr(wide_module, "tied_and_judged", _judged_by(lambda queries: (
        evaluated.append(queries) or dict.fromkeys(queries, 0.94 if len(evaluated) == 1 else 0.96))))  # fmt: skip
    found = wide_module._trained(sprints, sprints.plan, False)
    assert [queries for queries, *_ in seen.trained] == [["q0", "q2"]] and evaluated == [
        ["q0", "q2"],
        ["q0", "q1", "q2"],
    ]
    (row,) = [row for row in sprints.checkpoint.log if "accepted_bytes" in row]
    assert row["accepted_bytes"] == 0 and found.plan == sprints.plan, "one alone shares with nobody"
    waits = [(row["waits"], row["after"]) for row in sprints.checkpoint.log if "waits" in row]
    assert waits == [("q1", "the start"), ("q2", "sprint 1")]
    assert not any("repair" in row for row in sprints.checkpoint.log), "nobody has left"


@pytest.mark.usefixtures("nobody_takes")
@pytest.mark.parametrize(("won", "max_flops", "joins"), [(True, 1e15, True), (False, 1e15, False), (True, 0.0, False)])
def test_who_is_lost_after_a_sprint_is_tried_again_once_the_others_are_accepted(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch, won: bool, max_flops: float, joins: bool
) -> None:
    trained: list[list[str]] = []
    states = snapshots(ctx.originals)

    def sprint(sprints: Sprints, found: dict, recipe: Recipe, easing: bool) -> dict:
        trained.append(sorted(sprints.plan.queries()))
        ctx.flops.total += 1
        reached = 0.96 if won else 0.9
        ratios = {query: 0.5 if query == "q1" and len(trained) == 1 else reached for query in found["ratios"]}
        marked = {query: {**found["states"][query], "head.bias": torch.ones(2)} for query in ratios}
        return {**found, "rows": [], "ratios": ratios, "states": marked}

    apart = {query: {**state, "head.bias": torch.full((2,), 7.0)} for query, state in states.items()}
    begins = {"waits": {}, "apart": apart, "own": apart, "states": states, "ratios": dict.fromkeys(ctx.queries, 0.94)}
    given: list[dict] = []
    start = lambda _b, _p, _j, apart, *_: given.append(apart) or Start(apart, {}, apart)  # noqa: E731
    monkeypatch.setattr(wide_module, "_start", lambda *_, **__: begins)
    monkeypatch.setattr(wide_module, "choose_start", start)
    monkeypatch.setattr(wide_module, "tied_and_judged", _judged_by(lambda queries: dict.fromkeys(queries, 0.94)))
    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    monkeypatch.setattr(Sprints, "may_begin", property(lambda self: self.budget.flops_left > 0))
    monkeypatch.setattr(sprints_module, "SPRINTS", (0.75,))
    monkeypatch.setattr(Sprints, "_epochs", lambda *_, **__: 1)
    found = wide_module._trained(replace(sprints, budget=Budget(ctx.flops, max_flops)), sprints.plan, False)
    told = [(row.get("waits"), row.get("repair"), row["after"]) for row in sprints.checkpoint.log if "after" in row]
    assert told[0] == ("q1", None, "sprint 1")
    if not joins:
        assert found.plan == sprints.plan.without("q1") and not given and told[1:] == [(None, "leaves", "sprint 1")]
        return
    assert found.plan == sprints.plan and trained == [["q0", "q1", "q2"]] * 2 and len(told) == 1
    assert {query: int(state["head.bias"][0]) for query, state in given[0].items()} == {"q0": 1, "q1": 7, "q2": 1}
    (accepted,) = [row for row in sprints.checkpoint.log if "accepted_bytes" in row]
    assert accepted["accepted_bytes"] == sprints.plan.without("q1").saved_bytes(ctx.layers)
    assert found.won.plan == sprints.plan, "more than before it joined"


@pytest.mark.parametrize("enough", [True, False])
def test_no_trial_begins_that_leaves_no_work_for_a_sprint(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch, enough: bool
) -> None:
    monkeypatch.setattr(Sprints, "sprint", lambda _self, found, recipe: {**found, "rows": [], "won": None})
    half, shortest = replace(sprints.recipe, epochs=1, frames_per_epoch=256), replace(sprints.recipe, epochs=3)
    flops = sum(training_flops(ctx, list(ctx.queries), recipe) for recipe in (half, shortest))
    bounded = replace(sprints, budget=Budget(ctx.flops, ctx.flops.total + flops * (1.01 if enough else 0.99)))
    start = {"states": {}, "ratios": dict.fromkeys(ctx.queries, 0.5)}
    found = wide_module._trials(bounded, start)
    assert ("rate" in found) == enough and found["ratios"] == start["ratios"]


def test_a_start_may_take_a_part_of_the_work_that_is_left(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(wide_module, "choose_start", lambda _b, _p, _j, _a, most, _solving: given.append(most))
    wide_module._chosen(replace(sprints, budget=Budget(ctx.flops, ctx.flops.total + 4e12)))
    assert given == [pytest.approx(1e12)]


@pytest.mark.usefixtures("nobody_takes")
def test_what_is_below_is_not_accepted_before_the_others_join(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    _waits(ctx, monkeypatch, {"q0": 0.97, "q2": 0.94})
    monkeypatch.setattr(sprints_module, "SPRINTS", (0.75, 2))
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found, _last: found)
    monkeypatch.setattr(wide_module, "tied_and_judged", _judged_by(lambda queries: dict.fromkeys(queries, 0.94)))
    won = wide_module._trained(sprints, sprints.plan, False).won
    assert not won.plan.shared and not won.states
    assert [row["accepted_bytes"] for row in sprints.checkpoint.log if "accepted_bytes" in row] == [0]


@pytest.mark.parametrize("ends", ["less", "equal", "more"])
def test_where_the_end_saves_less_than_was_won_before_the_merge_is_that(
    ctx: MergeContext, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    plan = merged.plan
    others = plan.without("q1")
    before = {query: {**merged.states[query], "mark": torch.ones(1)} for query in others.queries()}
    ended = Merged({"less": SharingPlan(others.shared[1:]), "equal": others, "more": plan}[ends], merged.states)
    ratios = dict.fromkeys(ctx.queries, 0.94)
    trained = Trained(plan, merged.states, ratios, Recipe(), (), 1, Merged(others, before))
    monkeypatch.setattr(wide_module, "_trained", lambda *_: trained)
    monkeypatch.setattr(wide_module, "mend_all", lambda *_: (ended, []))
    checkpoint = Checkpoint(tmp_path / "kept", {}, False)
    kept = wide(ctx, OPTIONS, checkpoint)
    if ends != "less":
        assert kept.plan == ended.plan and [*map(list, checkpoint.log)] == [["recipe", "search_flops", "flops"]]
        assert all(kept.states[query] is ended.states[query] for query in ended.plan.queries())
        return
    assert kept.plan == others and all("mark" in kept.states[query] for query in ("q0", "q2"))
    original = ctx.originals["q1"].state_dict()
    assert all(torch.equal(kept.states["q1"][name], original[name]) for name in original)
    _, accepted, leaves = checkpoint.log
    assert accepted["accepted_bytes"] > accepted["instead_of_bytes"] and leaves["query"] == "q1"
    (why,) = {str(trial.in_the_way) for trial in all_at_once(plan.shared, checkpoint.log, trained.ratios, 1.0)
              if "q1" in dict(trial.members)}  # fmt: skip
    assert BACK in why and "0.94" in why


@pytest.mark.parametrize("spoils", [True, False])
def test_where_joining_spoils_it_the_others_are_mended_as_they_were_before(
    ctx: MergeContext, merged: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoils: bool
) -> None:
    plan, others = merged.plan, merged.plan.without("q1")
    near = {query: {**merged.states[query], "mark": torch.ones(1)} for query in ("q0", "q2")}
    nothing = Merged(SharingPlan(), {})
    first = Trained(others, near, {"q0": 0.99, "q2": 0.96}, Recipe(), (), 1, nothing)
    trained = Trained(plan, merged.states, dict.fromkeys(ctx.queries, 0.9), Recipe(), (), 2, nothing, first)
    mended: list[SharingPlan] = []

    def mend(_ctx: object, given: Merged, *_: object) -> tuple[Merged, list]:
        mended.append(given.plan)
        return (Merged(SharingPlan(), given.states) if spoils and given.plan == plan else given), []

    monkeypatch.setattr(wide_module, "_trained", lambda *_: trained)
    monkeypatch.setattr(wide_module, "mend_all", mend)
    checkpoint = Checkpoint(tmp_path / "kept", {}, False)
    kept = wide(ctx, OPTIONS, checkpoint)
    assert mended == ([plan, others] if spoils else [plan])
    assert kept.plan == (others if spoils else plan) and ("mark" in kept.states["q2"]) == spoils
    assert [row["query"] for row in checkpoint.log if "repair" in row] == (["q1"] if spoils else [])


def test_nobody_waits_where_the_others_would_share_nothing_or_all_have_trained_together(
    ctx: MergeContext, sprints: Sprints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = {"q1": 0.95, "q2": 0.95}
    monkeypatch.setattr(Start, "far_behind", property(lambda _: behind))
    monkeypatch.setattr(wide_module, "choose_start", _start_of_q0)
    found = wide_module._start(sprints)
    assert found["waits"] == {} and set(found["ratios"]) == set(ctx.queries)
    del behind["q2"]
    again = replace(sprints, checkpoint=Checkpoint(tmp_path / "again", {}, False))
    assert wide_module._start(again)["waits"] == behind
    third = replace(sprints, checkpoint=Checkpoint(tmp_path / "third", {}, False))
    own, tied = snapshots(ctx.originals), heaviest(sprints, 0.7)
    assert wide_module._start(third, own, tied=tied)["waits"] == {}


def test_the_first_rate_that_helps_is_taken_without_trying_others(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    after = {wide_module.RATES[0]: -0.05, wide_module.RATES[1]: 0.01, wide_module.RATES[2]: 0.9}
    lost = dict.fromkeys(ctx.queries, 0.5)

    def sprint(_self: object, found: dict, recipe: Recipe) -> dict:
        assert found["won"] == (tried[-1] if tried else None), "whatever a trial won is not lost to the next one"
        tried.append(recipe.rate)
        ratios = dict.fromkeys(lost, 0.5 + after[recipe.rate] * 0.5)
        return {"states": {}, "rows": [], "ratios": ratios, "won": recipe.rate}

    monkeypatch.setattr(Sprints, "sprint", sprint)
    found = wide_module._trials(sprints, {"states": {}, "ratios": lost, "rate": 0.0})
    assert tried == list(wide_module.RATES[:2]) and found["rate"] == wide_module.RATES[1]


@pytest.mark.usefixtures("nobody_takes")
def test_sprints_have_the_rate_of_the_trials(
    ctx: MergeContext, sprints: Sprints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = snapshots(ctx.originals)
    found = {"states": {}, "ratios": dict.fromkeys(ctx.queries, 0.94), "waits": {}, "apart": apart, "own": apart}
    trained = Trained(sprints.plan, {}, {}, Recipe(), (), 1, Merged(SharingPlan(), {}))
    ran: list[tuple[float, dict]] = []
    monkeypatch.setattr(wide_module, "_start", lambda *_, **__: found)
    monkeypatch.setattr(wide_module, "_trials", lambda *_: {**found, "rate": 3e-3})
    monkeypatch.setattr(Sprints, "run", lambda self, found: ran.append((self.recipe.rate, found["ratios"])) or trained)
    for choose_rate in (True, False):
        checkpoint = Checkpoint(tmp_path / str(choose_rate), {}, False)
        wide_module._trained(replace(sprints, checkpoint=checkpoint), sprints.plan, choose_rate)
    assert ran == [(3e-3, found["ratios"]), (sprints.recipe.rate, found["ratios"])]
