"""Taking over: the smallest model gives as it is, takers learn alone, and what was won stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import merger.methods.adopting as adopting_module
import merger.methods.wide as wide_module
from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshots
from merger.bench.workbench import Workbench
from merger.journal.outcomes import NO_TIME, all_at_once
from merger.methods.adopting import Adopting
from merger.methods.sprints import Sprints
from merger.start.choosing import Start
from models.sharing.layers import weight_key


@pytest.fixture
def adopting(bench: Workbench, sprints: Sprints) -> Adopting:
    return Adopting(bench, sprints.plan, sprints.recipe, sprints.required, sprints.checkpoint, sprints.bounds)


def taught(monkeypatch: pytest.MonkeyPatch, bearable: int) -> list[tuple[str, int]]:
    """Let training bring back every query that shares so many layers at most; returns what is tried."""
    tried = []

    def train(bench: Workbench, merged: Merged, plan: Any, query: str, *_: Any) -> dict[str, Any]:
        count = sum(owner == query for members in plan.shared for owner, _path in members)
        tried.append((query, count))
        bench.work.add_flops(1000)
        return {"ratio": 0.99 if count <= bearable else 0.5, "state": dict(merged.states[query]), "trained": 1}

    monkeypatch.setattr(adopting_module, "train_private", train)
    return tried


@pytest.mark.parametrize("bearable", [3, 1, 0])
def test_a_query_takes_as_much_as_it_bears(
    adopting: Adopting, bench: Workbench, monkeypatch: pytest.MonkeyPatch, bearable: int
) -> None:
    tried, apart = taught(monkeypatch, bearable), snapshots(bench.originals)
    adopting.checkpoint.meter = bench.work
    merged, ratios = adopting.run(apart)
    giver = adopting.plan.shared[0][-1][0] if bearable else None
    shares = {q: sum(o == q for members in merged.plan.shared for o, _ in members) for q in bench.queries}
    takers = {query for query, _ in tried}
    assert takers and all(shares[query] == min(bearable, 3) for query in takers), "portions of one layer"
    if giver is None:
        assert not merged.plan.shared and set(ratios.values()) == {1.0}
    for query in bench.queries.keys() - takers:
        assert all(torch.equal(merged.states[query][key], value) for key, value in apart[query].items())
    for members in merged.plan.shared:
        weights = [merged.states[query][weight_key(merged.states[query], path)] for query, path in members]
        assert len({query for query, _ in members} - takers) == 1, "one gives, and is none of those who take"
        assert all(torch.equal(weight, weights[0]) for weight in weights)
    rows = [row for row in adopting.checkpoint.log if "takes" in row]
    assert len(rows) == len(tried) and all(before["work"] < after["work"] for before, after in pairwise(rows))
    assert [row["takes"] for row in rows[: len(takers)]] == list(dict.fromkeys(query for query, _ in tried)), "in turn"
    kept = [row["accepted_bytes"] for row in rows]
    assert kept == sorted(kept) and kept[-1] == merged.plan.saved_bytes(bench.layers)


def test_the_log_says_of_every_layer_why_it_is_not_taken(
    adopting: Adopting, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(monkeypatch, 1)
    merged, _ = adopting.run(snapshots(bench.originals))
    trials = all_at_once(adopting.plan.shared, adopting.checkpoint.log, adopting.required, 1.0)
    shared = {member for members in merged.plan.shared for member in members}
    for trial in trials:
        given = {query for query, path in trial.members if (query, path) not in shared}
        assert bool(given) == bool(trial.in_the_way) or len(given) == len(trial.members)
        assert all(why["ratio"] == 0.5 for why in trial.in_the_way.values())


def test_without_work_nothing_is_taken(adopting: Adopting, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = taught(monkeypatch, 3)
    poor = replace(adopting, bounds=Bounds(bench.work, 1.0))
    assert not poor.run(snapshots(bench.originals))[0].plan.shared and not tried
    assert {row["after"] for row in adopting.checkpoint.log if "repair" in row} == {NO_TIME}


def test_an_epoch_is_as_long_as_data_and_work_allow(adopting: Adopting, bench: Workbench) -> None:
    takers = sorted(bench.queries)
    most = max(len(bench.train[query]) for query in takers)
    assert adopting._frames(takers) == most
    few = replace(adopting, bounds=Bounds(bench.work, 1.0), recipe=replace(adopting.recipe, frames_per_epoch=16))
    assert few._frames(takers) == 16


def test_where_nothing_is_left_of_any_query_no_joint_training_begins(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, apart = taught(monkeypatch, 3), snapshots(bench.originals)
    lost = Start(apart, dict.fromkeys(bench.queries, 0.92), apart, far=True)
    assert lost.shattered and not replace(lost, errors={**lost.errors, "q0": 0.5}).shattered
    assert not replace(lost, related=True).shattered, "what is related comes back"
    monkeypatch.setattr(wide_module, "choose_start", lambda *_: lost)
    monkeypatch.setattr(Sprints, "sprint", lambda *_: pytest.fail("a sprint began"))
    found = wide_module._trained(sprints, choose_rate=True)
    assert tried and found.plan == sprints.plan and found.won.plan == found.plan
    assert set(found.ratios) == found.plan.queries()


def test_where_a_sprint_loses_all_queries_they_take_from_each_other(
    bench: Workbench, sprints: Sprints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, apart = taught(monkeypatch, 3), snapshots(bench.originals)
    ratios = dict.fromkeys(bench.queries, 0.5)
    begins = {"waits": {}, "apart": apart, "states": apart, "ratios": ratios}
    monkeypatch.setattr(wide_module, "_start", lambda *_: begins)
    monkeypatch.setattr(Sprints, "sprint", lambda _self, found, *_: {**found, "rows": []})
    monkeypatch.setattr(Sprints, "_alone", lambda _self, found: found)
    found = wide_module._trained(sprints, choose_rate=False)
    assert tried and found.plan == sprints.plan and found.sprints == 1
