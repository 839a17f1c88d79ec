"""Portions: where all sets at once lose every query, the heaviest are tried alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

import merger.methods.sprints as sprints_module
import merger.methods.wide as wide_module
from merger.bench.bounds import Bounds
from merger.bench.merged import snapshots
from merger.bench.workbench import Workbench
from merger.journal.outcomes import all_at_once
from merger.methods.portions import heaviest
from merger.methods.sprints import Sprints
from merger.start.choosing import Start
from merger.training.loop import Recipe
from models.sharing.plan import SharingPlan


@pytest.mark.parametrize("bearable", [2, 1, 0])
def test_where_all_are_lost_the_heaviest_sets_are_tried_alone(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch, bearable: int
) -> None:
    portions = (0.9, 0.5, 0.25)
    sizes = [len(heaviest(sprints.plan, bench.layers, share).shared) for share in portions]
    assert (len(sprints.plan.shared), sizes) == (3, [2, 1, 1]), "or these cases are others"
    states, trained = snapshots(bench.originals), list[int]()

    def sprint(sprints: Sprints, found: dict, recipe: Recipe, easing: bool) -> dict:
        trained.append(len(sprints.plan.shared))
        ratio = 0.96 if len(sprints.plan.shared) <= bearable else 0.5
        return {**found, "rows": [], "ratios": dict.fromkeys(found["ratios"], ratio)}

    def judged(_bench, _journal, _plan, queries, states):
        return {query: bench.originals[query] for query in queries}, dict.fromkeys(queries, 0.5)

    begins = {"waits": {}, "apart": states, "states": states, "ratios": dict.fromkeys(bench.queries, 0.5)}
    monkeypatch.setattr(wide_module, "PORTIONS", portions)
    monkeypatch.setattr(wide_module, "_start", lambda *_: begins)
    monkeypatch.setattr(wide_module, "choose_start", lambda _b, _p, _j, apart, _m: Start(apart, {}, apart))
    monkeypatch.setattr(wide_module, "tied_and_judged", judged)
    monkeypatch.setattr(sprints_module, "SPRINTS", (0.75, 2))
    monkeypatch.setattr(Sprints, "sprint", sprint)
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found: found)
    monkeypatch.setattr(Sprints, "may_begin", property(lambda self: bool(self.plan.shared)))
    monkeypatch.setattr(Sprints, "_epochs", lambda self, _wanted, _eased: 1 if self.plan.shared else 0)
    found = wide_module._trained(replace(sprints, bounds=Bounds(bench.work, 1e15)), False)
    log, whole = sprints.checkpoint.log, sprints.plan.shared
    fits = next((place for place, size in enumerate(sizes) if size <= bearable), len(sizes))
    tried = list(dict.fromkeys([len(whole), *sizes[: fits + 1]]))
    assert trained == tried, "each portion once"
    left = {row["query"] for row in log if row.get("repair") == "leaves"}
    if not bearable:
        assert not found.plan.shared and left == set(bench.queries)
        return
    assert len(found.plan.shared) == tried[-1] and found.won.plan == found.plan
    assert left == bench.queries.keys() - found.plan.queries()
    apart = {(row["query"], path) for row in log if row.get("repair") == "portion" for path in row["private"]}
    members = {member for members in whole for member in members if member[0] not in left}
    assert apart == members - {member for members in found.plan.shared for member in members}
    trials = all_at_once(whole, log, sprints.required, 1.0)
    assert all(bool(trial.in_the_way) != (trial.members in found.plan.shared) for trial in trials)


def test_a_portion_is_the_heaviest_sets(bench: Workbench, sprints: Sprints) -> None:
    whole, layers = sprints.plan, list(bench.layers)
    saved = {members: SharingPlan((members,)).saved_bytes(layers) for members in whole.shared}
    half = heaviest(whole, layers, 0.5)
    assert set(half.shared) < set(whole.shared) and heaviest(whole, layers, 1.0) == whole
    least = min(saved[members] for members in half.shared)
    assert half.saved_bytes(layers) - least < 0.5 * sum(saved.values()) <= half.saved_bytes(layers)
    assert all(saved[members] <= least for members in whole.shared if members not in half.shared)
