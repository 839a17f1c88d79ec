"""Method `wide`: that it reaches the ceiling, how it repairs, what it gives up, and that its bundle is what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import merger.attempt as attempt_module
import merger.methods.wide as wide_module
from merger import merge
from merger.account import JOINING, all_at_once
from merger.bounds import Bounds
from merger.checkpoint import Checkpoint
from merger.distance import distances
from merger.journal import Journal
from merger.merit import merit
from merger.method import MergeOptions
from merger.methods.wide import whole_plan, wide
from merger.repair import RANKS, Step, copies, repair, residuals
from merger.repairs import repair_all
from merger.standing import training_flops
from merger.start import Start, donated
from merger.training import Diverged, Recipe, Training
from merger.workbench import Merged, State, Workbench, snapshot
from models.bundle import open_bundle
from models.groups import ceiling_bytes
from models.layers import weight_key
from models.plan import SharingPlan
from models.residual import residual_layers
from models.workload import Workload

UNSHARED = (1 / 2, 9 / 10, 1)
"""Parts of the tiny network's bytes that end between its layers."""
OPTIONS = MergeOptions(Recipe(rate=1e-3, epochs=2), choose_rate=False, precision="fp32")


@pytest.fixture
def bench(workload: Workload) -> Workbench:
    return Workbench(workload)


def test_the_whole_plan_saves_the_ceiling(bench: Workbench) -> None:
    plan = whole_plan(bench, OPTIONS)
    assert plan.saved_bytes(bench.layers) == ceiling_bytes(bench.layers) > 0


def test_wide_reaches_the_ceiling_on_a_tiny_workload(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merger.methods.wide.choose_start", _start_of_q0)  # a better one would need no training
    report = merge(workload, tmp_path / "b.gemel", "wide", options=OPTIONS)
    assert report.method == "wide" and report.saved_fraction == pytest.approx(report.ceiling_fraction, rel=1e-3)
    assert all(query.ratio > 0.8 for query in report.queries) and report.work > 0
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    forecast, first = rows[0]["forecast"], rows[1]
    alike = [row["likeness"] for row in forecast]
    sets = [row["set"] for row in rows if "set" in row]
    assert alike == sorted(alike) and sorted(row["set"] for row in forecast) == sorted(sets), "every set, least first"
    assert first["sprint"] == 1 and set(first["ratios"]) == {"q0", "q1", "q2"}


def test_distances_are_zero_for_the_original_and_grow_with_the_damage(bench: Workbench) -> None:
    model = bench.models(["q0"])["q0"]
    paths = ["stem.0", "body.0", "last.0"]
    assert set(distances(bench, "q0", model, paths).values()) == {0.0}
    with torch.no_grad():
        model.get_parameter("body.0.weight").mul_(0.5)
    found = distances(bench, "q0", model, paths)
    assert found["stem.0"] == 0 and found["body.0"] > 0.05 and found["last.0"] > 0


def test_a_repair_touches_no_other_query_and_ends_with_the_first_step_that_does(bench: Workbench) -> None:
    plan = whole_plan(bench, OPTIONS)
    merged = _damaged(bench, plan)
    required = 0.9
    recipe, bounds = Recipe(rate=3e-3, epochs=6), Bounds(bench.work)
    repaired, rows = repair(bench, merged, "q1", 0.5, recipe, required, Journal(), bounds)
    assert rows[0]["repair"] == "norms and head"
    for query in ("q0", "q2"):
        assert repaired.states[query] is merged.states[query]
    model = bench.models(["q1"], repaired.states, repaired.plan)["q1"]
    assert bench.ratio("q1", model) >= required
    for members in repaired.plan.shared:
        values = {id(members): repaired.states[q][weight_key(repaired.states[q], path)] for q, path in members}
        first = repaired.states[members[0][0]][weight_key(repaired.states[members[0][0]], members[0][1])]
        for query, path in members:
            assert torch.equal(repaired.states[query][weight_key(repaired.states[query], path)], first), values


def test_a_query_that_nothing_helps_gets_its_original_back(bench: Workbench) -> None:
    plan = whole_plan(bench, OPTIONS)
    merged = _damaged(bench, plan)
    bench.ratio = lambda query, model: 0.5
    repaired, rows = repair(bench, merged, "q1", 0.5, Recipe(rate=1e-3, epochs=1), 0.95, Journal(), Bounds(bench.work))
    dearest = [kind[-1].what for kind in _kinds(bench, merged)]
    assert [row["repair"] for row in rows] == ["norms and head", *dearest, "leaves"]
    assert not any(query == "q1" for members in repaired.plan.shared for query, _ in members)
    original = bench.originals["q1"].state_dict()
    assert all(torch.equal(repaired.states["q1"][name], original[name]) for name in original)


def test_layers_whose_answers_cannot_be_compared_are_repaired_last(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    monkeypatch.setattr("merger.repair.UNSHARED", UNSHARED)
    monkeypatch.setattr("merger.repair.parted", lambda *_: {"body.0": 0.1})
    most = copies(bench, merged, "q1", Journal())[-1].private
    assert most[0] == "body.0" and sorted(most) == ["body.0", "last.0", "stem.0"]


def test_the_steps_of_a_kind_rise_in_bytes_and_none_comes_twice(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    (only,) = _kinds(bench, merged)[1]
    assert only.what == "78.5% of its shared bytes private" and only.private == ("last.0",), "more than every part"
    monkeypatch.setattr("merger.repair.UNSHARED", UNSHARED)
    low_rank, private = _kinds(bench, merged)
    assert [step.what for step in low_rank] == [f"residuals of rank {rank}" for rank in RANKS]
    assert [len(step.private) for step in private] == [1, 2, 3]
    for steps in (low_rank, private):
        assert all(one.cost_bytes < other.cost_bytes for one, other in pairwise(steps))


@pytest.mark.parametrize("margin", ["whole", "half"])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("helps", [0, 1, 2])
def test_the_cheapest_step_of_the_first_kind_that_helps_is_kept(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, helps: int, kind: int, margin: str
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    monkeypatch.setattr("merger.repair.UNSHARED", UNSHARED)
    kinds, target = _kinds(bench, merged), bench.queries["q1"].accuracy_target
    better = target + (0.03 if margin == "whole" else 0.015)
    enough = kinds[kind][helps:] + (kinds[1] if kind == 0 else [])
    _train_by_step(monkeypatch, kinds, {step.what: better for step in enough})
    kept, rows = repair(bench, merged, "q1", 0.5, Recipe(), target + 0.02, Journal(), Bounds(bench.work), alone=True)
    assert kept.plan == kinds[kind][helps].plan
    tried = [row["repair"] for row in rows]
    assert len(tried) == len(set(tried)) and tried[0] == kinds[0][-1].what
    assert kind == 0 or not set(tried) & {step.what for step in kinds[0][:-1]}, "what rank 16 cannot, rank 4 cannot"


@pytest.mark.parametrize("narrow", [0, 1, 2])
def test_the_other_half_of_the_margin_may_cost_few_bytes_only(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, narrow: int
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    monkeypatch.setattr("merger.repair.UNSHARED", UNSHARED)
    kinds, target = _kinds(bench, merged), bench.queries["q1"].accuracy_target
    steps = [kinds[0][0], kinds[1][0]]
    dearest = copies(bench, merged, "q1", Journal())[-1].cost_bytes
    most = [0, steps[0].cost_bytes, steps[1].cost_bytes][narrow]
    monkeypatch.setattr("merger.repair.NARROW", most / dearest)  # which is all of its shared bytes
    _train_by_step(monkeypatch, kinds, {step.what: target + 0.02 for step in kinds[1]})
    kept, rows = repair(
        bench, merged, "q1", target + 0.01, Recipe(), target + 0.02, Journal(), Bounds(bench.work), alone=True
    )
    assert (kept is merged) == (narrow < 2) and kept.plan == (steps[1].plan if narrow == 2 else merged.plan)
    tried = {step.what for step in (*kinds[0], *kinds[1]) if step.cost_bytes <= most}
    assert {row["repair"] for row in rows} <= tried and bool(rows) == (narrow > 0)


def test_what_helped_is_kept_when_there_is_no_work_to_look_for_less(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    kinds = _kinds(bench, merged)
    for better in (0.99, 0.971):  # what is required, and half of the margin
        _train_by_step(monkeypatch, kinds, {step.what: better for step in (*kinds[0], *kinds[1])}, work=1e18)
        bounds = Bounds(bench.work, most_work=bench.work.total + 1e18)
        kept, rows = repair(bench, merged, "q1", 0.5, Recipe(), 0.98, Journal(), bounds, alone=True)
        assert kept.plan == kinds[0][-1].plan and [row["repair"] for row in rows] == [kinds[0][-1].what]


def test_bounded_work_goes_to_those_who_would_leave(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))

    def in_vain(bench, merged, plan, query, *_):
        bench.work.total += 1e18
        return {"state": merged.states[query], "ratio": 0.5, "epochs": 1, "carried": {}}

    def tried(ratios: Mapping[str, float], most_work: float) -> list[str]:
        bounds = Bounds(bench.work, most_work=bench.work.total + most_work)
        _, rows = repair_all(bench, merged, ratios, Recipe(), dict.fromkeys(ratios, 0.98), Journal(), bounds)
        return sorted(row["query"] for row in rows if "ratio" in row)

    monkeypatch.setattr("merger.repair.train_private", in_vain)
    assert tried({"q1": 0.5, "q2": 0.97}, 2e18) == ["q1", "q1"]
    assert tried({"q1": 0.966, "q2": 0.97}, 2e18) == ["q1", "q2"]
    assert tried({"q1": 0.5, "q2": 0.97}, math.inf) == ["q1"] * 3 + ["q2"]


def _kinds(bench: Workbench, merged: Merged) -> tuple[list[Step], list[Step]]:
    return residuals(bench, merged, "q1", Journal()), copies(bench, merged, "q1", Journal())


def _train_by_step(
    monkeypatch: pytest.MonkeyPatch, kinds: Sequence[Sequence[Step]], ratios: Mapping[str, float], work: float = 0.0
) -> None:
    """Let a training under a step's plan come to the ratio given for that step, or to 0.5."""

    def train(bench, merged, plan, query, *_):
        bench.work.total += work
        what = next(step.what for steps in kinds for step in steps if step.plan == plan)
        return {"state": merged.states[query], "ratio": ratios.get(what, 0.5), "epochs": 1, "carried": {}}

    monkeypatch.setattr("merger.repair.train_private", train)


def test_what_was_tried_alone_in_vain_is_not_tried_again_as_a_repair(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    found = {"states": merged.states, "ratios": {"q0": 1.0, "q1": 0.94, "q2": 0.92}, "rows": []}
    joint = _joint(bench, tmp_path)
    in_vain = {"ratio": 0.9, "epochs": 2, "carried": {}}
    for module in ("merger.methods.wide", "merger.repair"):
        monkeypatch.setattr(f"{module}.train_private", lambda _b, m, _p, query, *_: {
            "state": m.states[query], **in_vain})  # fmt: skip
    alone = joint._alone(found)["alone"]
    assert alone == ["q2"], "the furthest; after it all would train again"
    bounds = Bounds(bench.work)
    _, rows = repair_all(bench, merged, found["ratios"], Recipe(), joint.required, Journal(), bounds, alone)
    tried = {query: [row["repair"] for row in rows if row["query"] == query] for query in ("q1", "q2")}
    assert tried["q1"] == ["norms and head", *tried["q2"]] and len(tried["q2"]) > 2
    passed: list[object] = []
    trained = wide_module._Trained(joint.plan, found["states"], found["ratios"], Recipe(), alone, 1)
    monkeypatch.setattr(wide_module._Joint, "run", lambda *_: trained)
    monkeypatch.setattr(wide_module, "repair_all", lambda _b, m, *_, alone: passed.append(alone) or (m, []))
    wide(bench, OPTIONS, joint.checkpoint)
    assert passed == [alone]


def test_without_time_left_a_query_leaves_at_once(bench: Workbench) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    _, rows = repair(bench, merged, "q1", 0.5, Recipe(), 0.95, Journal(), Bounds(bench.work, most_work=0.0))
    assert [row["repair"] for row in rows] == ["leaves"]


def test_a_query_with_half_the_margin_is_kept_where_nothing_helps_it_further(bench: Workbench) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    half = (bench.queries["q1"].accuracy_target + 0.99) / 2
    no_time = Bounds(bench.work, most_work=0.0)
    kept, rows = repair(bench, merged, "q1", half, Recipe(), 0.99, Journal(), no_time)
    assert kept is merged and not rows
    _, rows = repair(bench, merged, "q1", half - 0.001, Recipe(), 0.99, Journal(), no_time)
    assert [row["repair"] for row in rows] == ["leaves"]
    bench.ratio = lambda query, model: half - 0.001 + 0.01 * bool(residual_layers(model))
    kept, rows = repair(bench, merged, "q1", half - 0.001, Recipe(epochs=1), 0.99, Journal(), Bounds(bench.work))
    assert kept.plan.residuals["q1"] and kept.plan.shared == merged.plan.shared
    assert not any(row["repair"] == "leaves" for row in rows)


def test_of_repairs_that_are_enough_the_one_with_the_fewest_bytes_is_kept(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = _damaged(bench, whole_plan(bench, OPTIONS))
    target = bench.queries["q1"].accuracy_target
    reached = iter([target + 0.021, target + 0.024, *[target + 0.029] * 20])
    monkeypatch.setattr("merger.repair.train_private", lambda _b, m, _p, query, *_: {
        "state": {**m.states[query]}, "ratio": next(reached), "epochs": 1, "carried": {}})  # fmt: skip
    required = target + 0.04
    kept, rows = repair(bench, merged, "q1", target, Recipe(), required, Journal(), Bounds(bench.work))
    assert kept.plan == merged.plan and [row["repair"] for row in rows] == ["norms and head"]
    reached = iter([target + 0.01, target + 0.021, *[target + 0.029] * 20])
    kept, _ = repair(bench, merged, "q1", target, Recipe(), required, Journal(), Bounds(bench.work))
    assert set(kept.plan.residuals["q1"].values()) == {RANKS[0]}
    reached = iter([target + 0.021] * 20)
    best = merged.states["q1"]
    kept, _ = repair(bench, merged, "q1", target + 0.03, Recipe(), required, Journal(), Bounds(bench.work))
    assert kept.states["q1"] is best, "no worse for as many bytes"


def test_a_bundle_holds_the_residuals_of_a_repair(bench: Workbench, tmp_path: Path, monkeypatch) -> None:
    plan = whole_plan(bench, OPTIONS)
    merged = _damaged(bench, plan)
    ratio = bench.ratio

    def needs_a_residual(query, model):
        return 1.0 if residual_layers(model) else min(0.5, ratio(query, model))

    bench.ratio = needs_a_residual
    repaired, rows = repair(bench, merged, "q1", 0.5, Recipe(rate=1e-3, epochs=1), 0.95, Journal(), Bounds(bench.work))
    assert rows[-1]["repair"] == f"residuals of rank {RANKS[0]}" and repaired.plan.residuals["q1"]
    monkeypatch.setattr("merger.merging.METHODS", {"wide": lambda *_: repaired})
    report = merge(bench.workload, tmp_path / "b.gemel", "wide", options=OPTIONS)
    by_id = {query.id: query for query in report.queries}
    assert by_id["q1"].residual_bytes == rows[-1]["cost_bytes"] > 0 == by_id["q0"].residual_bytes
    bundle = open_bundle(tmp_path / "b.gemel", factories=["tests.merger.tiny:tiny_net"])
    frames = torch.rand(2, 3, 24, 24)
    built = bundle.build("q1")
    wanted = bench.models(["q1"], repaired.states, repaired.plan)["q1"].eval()
    assert torch.allclose(built(frames), wanted(frames), atol=1e-6)


def test_a_workload_without_common_layers_keeps_its_originals(bench: Workbench) -> None:
    said = []
    bench.progress = lambda event, **fields: said.append(fields.get("text", ""))
    options = MergeOptions(Recipe(), min_saving=1.0)
    merged = wide(bench, options, SimpleNamespace(seconds=0.0))  # type: ignore[arg-type]
    assert not merged.plan.shared and any("nothing is shared" in text for text in said)


def _start_of_q0(
    bench: Workbench, plan: SharingPlan, journal: Journal, apart: Mapping[str, State] | None = None
) -> Start:
    models = dict(apart or {query: snapshot(model) for query, model in bench.originals.items()})
    return Start(donated(plan, models, "q0"), dict.fromkeys(plan.queries(), 0.5), models)


def _damaged(bench: Workbench, plan) -> Merged:
    """All tied with q0's weights, nothing retrained."""
    originals = {query: snapshot(model) for query, model in bench.originals.items()}
    models = bench.tied(plan, list(bench.queries), donated(plan, originals, "q0"))
    return Merged(plan, {query: snapshot(model) for query, model in models.items()})


def test_all_that_are_almost_there_count_more_than_one_that_is() -> None:
    required = dict.fromkeys("abc", 0.95)
    almost, one = {"a": 0.94, "b": 0.93, "c": 0.94}, {"a": 1.0, "b": 0.3, "c": 0.3}
    assert merit(almost, required) > merit(one, required)
    assert merit({"a": 1.2, "b": 0.9, "c": 0.9}, required) == merit({"a": 0.95, "b": 0.9, "c": 0.9}, required)


def _joint(bench: Workbench, folder: Path, required: float = 0.95) -> wide_module._Joint:
    plan, wanted = whole_plan(bench, OPTIONS), dict.fromkeys(bench.queries, required)
    bounds = Bounds(bench.work)
    return wide_module._Joint(bench, plan, Recipe(), wanted, Checkpoint(folder, {}, False), bounds, bounds)


@pytest.mark.parametrize(
    ("after_trials", "after_sprints", "epochs"),
    [(0.94, 0.85, [3, 8, 16]), (0.8, 0.85, [8, 16]), (0.8, 0.945, [8, 16])],
)
def test_a_merge_that_begins_far_off_has_no_short_sprint(
    bench: Workbench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after_trials: float,
    after_sprints: float,
    epochs: list[int],
) -> None:
    sprints: list[Recipe] = []
    found = {"states": {query: {} for query in bench.queries}, "ratios": dict.fromkeys(bench.queries, after_trials),
             "rate": 1e-3, "rows": [], "forecast": {}, "waits": {}}  # fmt: skip

    def sprint(_self: object, _found: object, recipe: Recipe, _eased: object) -> dict:
        sprints.append(recipe)
        return {**found, "ratios": dict.fromkeys(bench.queries, after_sprints)}

    monkeypatch.setattr(wide_module._Joint, "_alone", lambda _self, found: found)
    monkeypatch.setattr(wide_module._Joint, "_start", lambda _: found)
    monkeypatch.setattr(wide_module._Joint, "_sprint", sprint)
    _joint(bench, tmp_path).run(choose_rate=False)
    assert [one.epochs for one in sprints] == epochs
    assert [one.rate for one in sprints] == [1e-3 / 2**index for index in range(len(epochs))]


def test_who_is_lost_after_a_sprint_leaves_before_the_next_one(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []
    found = {"states": {query: {} for query in bench.queries}, "ratios": dict.fromkeys(bench.queries, 0.94),
             "rate": 1e-3, "rows": [], "forecast": {}, "waits": {}}  # fmt: skip

    def sprint(_self: object, found: dict, _recipe: Recipe, _eased: object) -> dict:
        trained.append(sorted(found["ratios"]))
        return {**found, "ratios": {query: 0.7 if query == "q1" else 0.9 for query in found["ratios"]}}

    monkeypatch.setattr(wide_module._Joint, "_start", lambda _: found)
    monkeypatch.setattr(wide_module._Joint, "_sprint", sprint)
    joint = _joint(bench, tmp_path)
    left = joint.run(choose_rate=False)
    assert trained == [["q0", "q1", "q2"], ["q0", "q2"], ["q0", "q2"]] and set(left.states) == {"q0", "q2"}
    assert left.plan == joint.plan.without("q1")
    _forecast, row = joint.checkpoint.log
    assert (row["query"], row["repair"], row["after"], row["ratio"]) == ("q1", "leaves", "sprint 1", 0.7)


def _waits(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, after: Mapping[str, float]
) -> SimpleNamespace:
    """Let q1 wait, and a sprint of the others come to the ratios given.

    What is `trained` and how, within which work (`bounds`), and who was, of those a start is made of (`marked`).
    """
    trained, bounds, marked = [], [], []
    states = {query: snapshot(model) for query, model in bench.originals.items()}
    half = dict.fromkeys(bench.queries, 0.5)

    def sprint(joint: wide_module._Joint, found: dict, recipe: Recipe, easing: bool) -> dict:
        trained.append((sorted(joint.plan.queries()), recipe.epochs, recipe.rate, easing))
        bounds.append(joint.bounds.most_work)
        ratios = {query: after[query] if "q1" not in found["ratios"] else 0.9 for query in found["ratios"]}
        marked = {query: {**found["states"][query], "head.bias": torch.full((2,), len(trained))} for query in ratios}
        return {**found, "rows": [], "ratios": ratios, "states": marked}

    def start(_bench: object, _plan: object, _journal: object, apart: Mapping[str, State]) -> Start:
        marked.append([query for query, state in apart.items() if set(state["head.bias"].tolist()) == {1.0}])
        return Start(dict(apart), half, dict(apart))

    begins = {"waits": {"q1": 0.95}, "apart": states, "forecast": {}}
    monkeypatch.setattr(wide_module._Joint, "_start", lambda _: begins)
    monkeypatch.setattr(wide_module._Joint, "_sprint", sprint)
    monkeypatch.setattr(wide_module, "choose_start", start)
    return SimpleNamespace(trained=trained, bounds=bounds, marked=marked)


def test_the_others_are_merged_and_accepted_before_who_waits_joins_them(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _waits(bench, monkeypatch, {"q0": 0.96, "q2": 0.97})
    monkeypatch.setattr(wide_module, "judge_all", lambda _b, _j, _n, models, _p: dict.fromkeys(models, 0.94))
    monkeypatch.setattr(wide_module, "train_private", lambda _b, merged, _p, query, *_: {
        "state": merged.states[query], "ratio": 0.9, "epochs": 1, "carried": {}})  # fmt: skip
    joint = replace(_joint(bench, tmp_path), bounds=Bounds(bench.work, 1e15))
    found = joint.run(choose_rate=False)
    assert seen.marked == [[], ["q0", "q2"]], "it joins what was made of them"
    assert seen.bounds == [0.5e15, 1e15, 1e15, 1e15], "half of the work is kept for when it joins"
    both = ["q0", "q1", "q2"]
    rate = joint.recipe.rate
    assert seen.trained[0] == (["q0", "q2"], 8, rate, False)
    assert seen.trained[1:] == [(both, 3, rate, True), (both, 8, rate / 2, True), (both, 16, rate / 4, True)]
    others = joint.plan.without("q1")
    assert found.accepted.plan == others and set(found.accepted.states) == {"q0", "q2"} and found.sprints == 4
    assert all(int(state["head.bias"][0]) == 1 for state in found.accepted.states.values()), "before it joined"
    forecast, waits, accepted, *_ = joint.checkpoint.log
    assert forecast == {} and (waits["waits"], waits["lost"]) == ("q1", 0.95)
    assert accepted["accepted_bytes"] == others.saved_bytes(bench.layers) > 0


def test_who_is_lost_among_the_others_waits_too_and_what_is_left_is_accepted(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _waits(bench, monkeypatch, {"q0": 0.97, "q2": 0.5})
    judged: list[list[str]] = []
    monkeypatch.setattr(wide_module, "judge_all", lambda _b, _j, _n, models, _p: (
        judged.append(sorted(models)) or dict.fromkeys(models, 0.94 if len(judged) == 1 else 0.96)))  # fmt: skip
    joint = _joint(bench, tmp_path)
    found = joint.run(choose_rate=False)
    assert [queries for queries, *_ in seen.trained] == [["q0", "q2"]] and judged == [["q0", "q2"], ["q0", "q1", "q2"]]
    assert not found.accepted.plan.shared and found.plan == joint.plan, "one alone shares with nobody"
    waits = [(row["waits"], row["after"]) for row in joint.checkpoint.log if "waits" in row]
    assert waits == [("q1", "the start"), ("q2", "sprint 1")]
    assert not any("repair" in row for row in joint.checkpoint.log), "nobody has left"


def test_what_is_below_is_not_accepted_before_the_others_join(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _waits(bench, monkeypatch, {"q0": 0.97, "q2": 0.94})
    monkeypatch.setattr(wide_module, "SPRINTS", (0.75, 2))
    monkeypatch.setattr(wide_module._Joint, "_alone", lambda _self, found: found)
    monkeypatch.setattr(wide_module, "judge_all", lambda _b, _j, _n, models, _p: dict.fromkeys(models, 0.94))
    joint = _joint(bench, tmp_path)
    found = joint.run(choose_rate=False)
    assert not found.accepted.plan.shared and not found.accepted.states
    assert [row["accepted_bytes"] for row in joint.checkpoint.log if "accepted_bytes" in row] == [0]


@pytest.mark.parametrize("ends", ["less", "equal", "more"])
def test_where_all_come_to_less_the_merge_is_that_without_those_who_waited(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    plan = whole_plan(bench, OPTIONS)
    merged = _damaged(bench, plan)
    others = plan.without("q1")
    before = {query: {**merged.states[query], "mark": torch.ones(1)} for query in others.queries()}
    ended = Merged({"less": SharingPlan(others.shared[1:]), "equal": others, "more": plan}[ends], merged.states)
    ratios = dict.fromkeys(bench.queries, 0.94)
    trained = wide_module._Trained(plan, merged.states, ratios, Recipe(), (), 1, Merged(others, before))
    monkeypatch.setattr(wide_module._Joint, "run", lambda *_: trained)
    monkeypatch.setattr(wide_module, "repair_all", lambda *_, alone: (ended, []))
    checkpoint = Checkpoint(tmp_path / "kept", {}, False)
    kept = wide(bench, OPTIONS, checkpoint)
    if ends != "less":
        assert kept is ended and not checkpoint.log
        return
    assert kept.plan == others and all("mark" in kept.states[query] for query in ("q0", "q2"))
    original = bench.originals["q1"].state_dict()
    assert all(torch.equal(kept.states["q1"][name], original[name]) for name in original)
    accepted, leaves = checkpoint.log
    assert accepted["accepted_bytes"] > accepted["instead_of_bytes"] and leaves["query"] == "q1"
    (why,) = {str(trial.in_the_way) for trial in all_at_once(plan.shared, checkpoint.log, trained.ratios, 1.0)
              if "q1" in dict(trial.members)}  # fmt: skip
    assert JOINING in why and "0.94" in why


def test_nobody_waits_where_the_others_would_share_nothing(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = _joint(bench, tmp_path)
    behind = {"q1": 0.95, "q2": 0.95}
    monkeypatch.setattr(Start, "far_behind", property(lambda _: behind))
    monkeypatch.setattr(wide_module, "choose_start", _start_of_q0)
    found = joint._start()
    assert found["waits"] == {} and set(found["ratios"]) == set(bench.queries)
    del behind["q2"]
    assert _joint(bench, tmp_path / "again")._start()["waits"] == behind


def test_a_sprint_is_judged_while_its_rate_falls(bench: Workbench, tmp_path: Path) -> None:
    joint = _joint(bench, tmp_path, required=2.0)  # out of reach, so that it goes on to its end
    states = {query: snapshot(model) for query, model in bench.tied(joint.plan, bench.queries).items()}
    before = {"states": states, "ratios": dict.fromkeys(bench.queries, 0.5)}
    found = joint._sprint(before, Recipe(epochs=4, frames_per_epoch=16))
    assert [row["epoch"] for row in found["rows"]] == [0, 2, 3, 4]


def test_who_has_what_is_required_makes_room_for_the_others(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = _joint(bench, tmp_path)
    states = {query: snapshot(model) for query, model in bench.tied(joint.plan, bench.queries).items()}
    ratios = {"q0": 0.95, "q1": 0.9, "q2": 1.0}
    before = {"states": states, "ratios": ratios, "rate": 1e-3, "rows": [], "forecast": {}, "waits": {}}
    seen: list[set[str]] = []

    def training(_models: object, _recipe: Recipe, eased: set[str]) -> None:
        seen.append(set(eased))
        raise Diverged("none")

    monkeypatch.setattr(bench, "training", training)
    monkeypatch.setattr(wide_module._Joint, "_start", lambda _: before)
    monkeypatch.setattr(wide_module._Joint, "_alone", lambda _self, found: found)
    joint.run(choose_rate=False)
    assert seen == [set(), {"q0", "q2"}, {"q0", "q2"}], "half an epoch flatters: nobody is eased in the first sprint"
    whole = training_flops(bench, list(bench.queries), Recipe(epochs=1))
    bounded = replace(joint, bounds=Bounds(bench.work, bench.work.total + 4 * whole))
    assert bounded._epochs(16, set()) == 4 < bounded._epochs(16, {"q0", "q2"}) < 8, "what is saved buys epochs"


def test_who_falls_below_is_eased_no_longer_until_it_is_back(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = _joint(bench, tmp_path)
    states = {query: snapshot(model) for query, model in bench.tied(joint.plan, bench.queries).items()}
    before = {"states": states, "ratios": {"q0": 0.95, "q1": 0.9, "q2": 1.0}}
    judged = iter([{"q0": 0.94, "q2": 0.96}, {"q0": 0.97, "q2": 0.97}, {"q0": 0.9, "q2": 0.95}])
    eased: list[list[str]] = []
    monkeypatch.setattr(attempt_module, "judge_all", lambda *_: {"q1": 0.9, **next(judged)})
    epoch = Training.epoch
    monkeypatch.setattr(Training, "epoch", lambda self: eased.append(self.eased) or epoch(self))
    joint._sprint(before, Recipe(epochs=5, frames_per_epoch=16), easing=True)
    assert eased == [["q0", "q2"], ["q0", "q2"], ["q0", "q2"], ["q2"], ["q0", "q2"]]


def test_a_sprint_that_takes_more_work_than_planned_goes_on_to_the_end_of_all(bench: Workbench, tmp_path: Path) -> None:
    joint = _joint(bench, tmp_path, required=2.0)
    states = {query: snapshot(model) for query, model in bench.tied(joint.plan, bench.queries).items()}
    before = {"states": states, "ratios": dict.fromkeys(bench.queries, 0.5)}
    spent = Bounds(bench.work, 0.0)
    found = replace(joint, bounds=spent)._sprint(before, Recipe(epochs=4, frames_per_epoch=16))
    assert [row["epoch"] for row in found["rows"]] == [0, 2, 3, 4]
    cut = replace(joint, end=spent, checkpoint=Checkpoint(tmp_path / "cut", {}, False))
    found = cut._sprint(before, Recipe(epochs=4, frames_per_epoch=16))
    assert [row["epoch"] for row in found["rows"]] == [0, 2], "but not past it, when one epoch was judged"


def test_the_first_rate_that_helps_is_taken_without_trying_others(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    after = {wide_module.RATES[0]: -0.05, wide_module.RATES[1]: 0.01, wide_module.RATES[2]: 0.9}
    lost = dict.fromkeys(bench.queries, 0.5)
    joint = _joint(bench, tmp_path)

    def sprint(_self: object, _found: object, recipe: Recipe) -> dict:
        tried.append(recipe.rate)
        return {"states": {}, "rows": [], "ratios": dict.fromkeys(lost, 0.5 + after[recipe.rate] * 0.5)}

    monkeypatch.setattr(wide_module._Joint, "_sprint", sprint)
    found = joint._trials({"states": {}, "ratios": lost, "rate": 0.0})
    assert tried == list(wide_module.RATES[:2]) and found["rate"] == wide_module.RATES[1]
