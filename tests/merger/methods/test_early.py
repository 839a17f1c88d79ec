"""Early layers: which they are, when each query has its own, and what a log says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import merger.methods.early as early_module
import merger.methods.top_down as wide_module
from merger import merge
from merger.checkpoint import snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions
from merger.methods.early import EARLY, EARLY_APART, early_layers, plan_without
from merger.methods.sprints import Sprints, Trained
from merger.outcomes import LEAVES, NO_TIME
from merger.start.choosing import donated
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan
from models.workload import Workload

OPTIONS = MergeOptions(Recipe(rate=1e-3, epochs=2), choose_rate=False, precision="fp32")


@pytest.mark.parametrize(("part", "layers"), [(EARLY, 1), (1 / 4, 2), (0, 0)])
def test_early_layers_are_the_first_that_are_shared_up_to_a_part_of_their_bytes(
    ctx: MergeContext, sprints: Sprints, monkeypatch: pytest.MonkeyPatch, part: float, layers: int
) -> None:
    monkeypatch.setattr(early_module, "EARLY", part)
    paths = ["stem.0", "body.0", "last.0"]
    assert early_layers(ctx, sprints.plan) == dict.fromkeys(ctx.queries, paths[:layers]), "q1's extra is its own"
    assert early_layers(ctx, sprints.plan.with_private("q1", ["stem.0"]))["q1"] == paths[1 : max(1, layers)]


def test_no_early_layer_is_apart_that_is_all_that_somebody_shares(ctx: MergeContext, sprints: Sprints) -> None:
    plan = sprints.plan.with_private("q1", ["body.0", "last.0"])
    assert early_layers(ctx, plan) == {"q0": [], "q1": [], "q2": []}, "q1 has nothing else"


@pytest.fixture
def later(sprints: Sprints) -> SharingPlan:
    """The plan in which all stems are apart."""
    return plan_without(sprints.plan, {query: ["stem.0"] for query in sprints.required})


def _reached(sprints: Sprints, plan: SharingPlan, ratios: Mapping[str, float]) -> Trained:
    """What a training under this plan that ends with these ratios came to: everybody's own weights."""
    own = snapshots(sprints.ctx.originals)
    return Trained(plan, own, ratios, replace(Recipe(), rate=4e-4), (), 2, Merged(SharingPlan(), {}), own=own)


@pytest.mark.parametrize("far", [True, False])
def test_a_merge_says_which_early_layers_everybody_keeps(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    monkeypatch.setattr(early_module, "EARLY", 1 / 4)
    monkeypatch.setattr("merger.start.choosing.FAR", 0.0 if far else 1.0)
    report = merge(workload, tmp_path / "b.gemel", "top-down", options=OPTIONS)
    rows = [json.loads(line) for line in (tmp_path / "b.gemel.log.jsonl").read_text().splitlines()]
    kept = {row["query"]: row["private"] for row in rows if row.get("repair") == EARLY_APART}
    assert kept == ({query: ["stem.0", "body.0"] for query in ("q0", "q1", "q2")} if far else {})
    assert (report.saved_fraction == pytest.approx(report.ceiling_fraction, rel=1e-3)) == (not far)


@pytest.mark.parametrize(("far", "waits"), [(False, {}), (True, {}), (True, {"q1": 0.95})])
def test_early_layers_are_apart_where_it_begins_far_off(
    sprints: Sprints, later: SharingPlan, monkeypatch: pytest.MonkeyPatch, far: bool, waits: dict[str, float]
) -> None:
    own = snapshots(sprints.ctx.originals)
    begun: list[tuple[SharingPlan, object]] = []

    def start(now: Sprints, given: object = None, again: bool = False, tied: SharingPlan | None = None) -> dict:
        assert again == (given is None), "it is solved where nothing else is chosen"
        begun.append((now.plan, given))
        found = {"waits": waits if given is None else {}, "apart": own, "own": own, "far": far}
        return {**found, "states": own, "ratios": dict.fromkeys(now.required, 0.9)}

    monkeypatch.setattr(wide_module, "_start", start)
    monkeypatch.setattr(
        wide_module,
        "prelude",
        lambda *_, **__: {"won": Merged(SharingPlan(), {}).to_plain(), "states": {}, "tied": SharingPlan().to_json()},
    )
    monkeypatch.setattr(Sprints, "run", lambda self, found: _reached(self, self.plan, found["ratios"]))
    tried: list[dict] = []
    monkeypatch.setattr(wide_module, "_trials", lambda _sprints, found: tried.append(found) or found)
    trained = wide_module._trained(sprints, later, True)
    assert bool(tried) == (not far), "half an epoch makes nothing better that was solved"
    assert begun == [(sprints.plan, None), (later, own)][: 2 if far else 1]
    assert trained.plan == (later if far else sprints.plan)


@pytest.mark.parametrize("shares", [("q0", "q2"), ()])
def test_where_no_work_is_left_after_the_prelude_what_it_holds_is_the_merge(
    sprints: Sprints, later: SharingPlan, monkeypatch: pytest.MonkeyPatch, shares: tuple[str, ...]
) -> None:
    own = snapshots(sprints.ctx.originals)
    plan = sprints.plan.without(*(own.keys() - shares))
    won = Merged(plan, {query: own[query] for query in shares})
    begun: list[object] = []

    def start(_now: object, given: object = None, **_: object) -> dict:
        begun.append(given)
        return {"waits": {}, "apart": own, "own": own, "far": True}

    monkeypatch.setattr(wide_module, "_start", start)
    found = {"won": won.to_plain(), "states": {}, "tied": SharingPlan().to_json()}
    monkeypatch.setattr(wide_module, "prelude", lambda *_: found)
    over = replace(sprints, budget=Budget(sprints.ctx.flops, sprints.ctx.flops.total))
    trained = wide_module._trained(over, later, True)
    assert begun == [None], "no other start is looked for"
    assert trained.plan == plan and set(trained.ratios) == set(trained.states) == set(shares)
    assert trained.won.plan == plan and trained.own is own and trained.sprints == 0
    left = [(row["query"], row["repair"], row["after"]) for row in sprints.checkpoint.log]
    assert left == [(query, LEAVES, NO_TIME) for query in sorted(own.keys() - shares)]


def test_where_all_is_shattered_models_become_parts_of_each_other_early_layers_and_all(
    sprints: Sprints, later: SharingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_module, "_start", lambda *_, **__: {"far": True, "shattered": True})
    monkeypatch.setattr(wide_module, "_adopted", lambda now, *_: _reached(now, now.plan, {}))
    assert wide_module._trained(sprints, later, False).plan == sprints.plan


def test_where_all_is_tied_already_no_start_is_chosen(sprints: Sprints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_module, "choose_start", lambda *_: pytest.fail("there is nothing to choose"))
    own = donated(sprints.plan, snapshots(sprints.ctx.originals), "q0")
    found = wide_module._start(sprints, own, tied=sprints.plan)
    assert not found["waits"] and set(found["ratios"]) == set(found["states"]) == set(own)
    key = "last.0.weight"
    assert all(torch.equal(state[key], own["q0"][key]) for state in found["states"].values())
