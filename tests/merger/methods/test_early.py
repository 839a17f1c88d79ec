"""Early layers: apart while all train, then shared too where one more sprint shows that all bear it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import merger.methods.early as early_module
import merger.methods.wide as wide_module
from merger import merge
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.method import MergeOptions
from merger.bench.workbench import Workbench
from merger.methods.early import EARLY, EARLY_APART, early_layers
from merger.methods.sprints import Sprints, Trained
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan
from models.workload import Workload

OPTIONS = MergeOptions(Recipe(rate=1e-3, epochs=2), choose_rate=False, precision="fp32")


@pytest.mark.parametrize(("part", "layers"), [(EARLY, 1), (1 / 4, 2), (0, 0)])
def test_early_layers_are_the_first_that_are_shared_up_to_a_part_of_their_bytes(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch, part: float, layers: int
) -> None:
    monkeypatch.setattr(early_module, "EARLY", part)
    paths = ["stem.0", "body.0", "last.0"]
    assert early_layers(bench, sprints.plan) == dict.fromkeys(bench.queries, paths[:layers]), "q1's extra is its own"
    assert early_layers(bench, sprints.plan.with_private("q1", ["stem.0"]))["q1"] == paths[1 : max(1, layers)]


def test_no_early_layer_is_apart_that_is_all_that_somebody_shares(bench: Workbench, sprints: Sprints) -> None:
    plan = sprints.plan.with_private("q1", ["body.0", "last.0"])
    assert early_layers(bench, plan) == {"q0": [], "q1": [], "q2": []}, "q1 has nothing else"


@pytest.fixture
def later(sprints: Sprints) -> Sprints:
    """The training of all whose stems are apart."""
    plan = sprints.plan
    for query in sorted(plan.queries()):
        plan = plan.with_private(query, ["stem.0"])
    return replace(sprints, plan=plan, whole=sprints.plan)


def _reached(sprints: Sprints, ratios: Mapping[str, float]) -> Trained:
    """What a training that ends with these ratios came to: everybody's own weights."""
    plan, own = sprints.plan, snapshots(sprints.bench.originals)
    return Trained(plan, own, ratios, replace(Recipe(), rate=4e-4), (), 2, Merged(SharingPlan(), {}), own=own)


@pytest.mark.parametrize(("after", "kept"), [(0.96, True), (0.94, False)])
def test_where_all_have_what_is_required_one_sprint_trains_their_early_layers_too(
    later: Sprints, monkeypatch: pytest.MonkeyPatch, after: float, kept: bool
) -> None:
    ran: list[tuple[SharingPlan, float, int]] = []

    def sprint(self: Sprints, found: dict, recipe: Recipe, easing: bool) -> dict:
        assert set(found["ratios"]) == set(self.required) and easing
        ran.append((self.plan, recipe.rate, recipe.epochs))
        return {**found, "rows": [], "ratios": dict.fromkeys(found["ratios"], after)}

    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found: found)
    first = _reached(later, dict.fromkeys(later.required, 0.97))
    found = wide_module._with_early_layers(later, first)
    assert ran == [(later.whole, 2e-4, 8)]
    assert (found.plan, found.sprints) == ((later.whole, 3) if kept else (later.plan, 2))
    if not kept:
        assert found is first
    (row,) = later.checkpoint.log
    assert row["accepted_bytes"] == later.plan.saved_bytes(later.bench.layers), "what was held before"


@pytest.mark.parametrize("why", ["one is below", "no work", "one waits", "no early layers"])
def test_early_layers_stay_apart_where_they_cannot_be_trained(
    later: Sprints, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(Sprints, "annealed", lambda *_: pytest.fail("there is nothing to train"))
    ratios = {query: 0.94 if (query, why) == ("q1", "one is below") else 0.97 for query in later.required}
    first = _reached(later, ratios)
    if why == "no work":
        later = replace(later, bounds=Bounds(later.bench.work, 0.0))
    elif why == "one waits":
        first = replace(first, plan=first.plan.without("q1"))
    elif why == "no early layers":
        later = replace(later, whole=later.plan)
    assert wide_module._with_early_layers(later, first) is first and not later.checkpoint.log


@pytest.mark.parametrize("enough", [True, False])
def test_a_merge_says_which_early_layers_everybody_keeps(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: bool
) -> None:
    monkeypatch.setattr(early_module, "EARLY", 1 / 4)
    monkeypatch.setattr(wide_module, "_whole_where_easy", lambda *given: given)
    if not enough:
        monkeypatch.setattr(Sprints, "may_begin", False)
    report = merge(workload, tmp_path / "b.gemel", "wide", options=OPTIONS)
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    kept = {row["query"]: row["private"] for row in rows if row.get("repair") == EARLY_APART}
    assert kept == ({} if enough else {query: ["stem.0", "body.0"] for query in ("q0", "q1", "q2")})
    assert (report.saved_fraction == pytest.approx(report.ceiling_fraction, rel=1e-3)) == enough


@pytest.mark.parametrize(
    ("easy", "with_early", "whole"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_where_it_is_easy_with_early_layers_too_all_train_with_them_from_the_beginning(
    later: Sprints, monkeypatch: pytest.MonkeyPatch, easy: bool, with_early: bool, whole: bool
) -> None:
    ratio = {True: 0.9, False: 0.8}
    monkeypatch.setattr(wide_module, "_begun", lambda sprints, _: {
        "states": {}, "ratios": dict.fromkeys(sprints.required, ratio[with_early])})  # fmt: skip
    own = snapshots(later.bench.originals)
    start = {"waits": {}, "apart": own, "own": {}, "states": own, "ratios": dict.fromkeys(later.required, ratio[easy])}
    sprints, found = wide_module._whole_where_easy(later, start)
    assert sprints.plan == (later.whole if whole else later.plan)
    assert (found is start) != whole and found["own"] == (own if whole else {})
    waits = {**start, "waits": {"q1": 0.9}}
    assert wide_module._whole_where_easy(later, waits) == (later, waits)
