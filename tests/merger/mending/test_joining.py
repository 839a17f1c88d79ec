"""Who left a training joins what came of it, with as many shared layers as it bears."""

from __future__ import annotations

import pytest
import torch

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged, snapshot
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.mending.joining import join_all
from merger.mending.search import Case
from merger.training.recipe import Recipe

UNSHARED = (1 / 2, 9 / 10)
"""The tiny network's heaviest layer to itself, or all but its lightest."""


@pytest.fixture
def left(bench: Workbench, merged: Merged, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A query that left what the other two share."""
    monkeypatch.setattr("merger.mending.steps.UNSHARED", UNSHARED)
    return Case("q1", 0.0, 0.9, Recipe(rate=3e-3, epochs=6), True, snapshot(bench.originals["q1"]))


def test_it_shares_the_others_weights_and_they_stay_as_they_are(bench: Workbench, merged: Merged, left: Case) -> None:
    others = Merged(merged.plan.without("q1"), {query: merged.states[query] for query in ("q0", "q2")})
    after, rows = join_all(bench, others, merged.plan, [left], Journal(), Bounds(bench.work))
    assert rows[-1]["ratio"] >= 0.9 or rows[0]["ratio"] >= 0.9
    assert all(after.states[query] is others.states[query] for query in ("q0", "q2"))
    joined = [members for members in after.plan.shared if "q1" in dict(members)]
    assert joined and after.plan.without("q1").shared == others.plan.shared
    for members in joined:
        values = [after.states[query][f"{path}.weight"] for query, path in members]
        assert len(values) == 3 and all(torch.equal(values[0], value) for value in values)
    assert bench.ratio("q1", bench.models(["q1"], after.states, after.plan)["q1"]) >= 0.9


def test_a_layer_that_only_one_of_the_others_has_is_shared_with_it(
    bench: Workbench, merged: Merged, left: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q2 shares nothing but the first layer: the other layers of it and q0 are two weights each."""
    plan = merged.plan.without("q1").with_private("q2", ["body.0", "last.0"])
    others = Merged(plan, {query: merged.states[query] for query in ("q0", "q2")})
    monkeypatch.setattr(bench, "ratio", lambda *_: 1.0)
    after, _ = join_all(bench, others, merged.plan, [left], Journal(), Bounds(bench.work))
    assert (("q0", "body.0"), ("q1", "body.0")) in after.plan.shared


def test_who_bears_nothing_is_left_out_as_the_original_without_a_word(
    bench: Workbench, merged: Merged, left: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Merged(merged.plan.without("q1"), merged.states)
    monkeypatch.setattr(bench, "ratio", lambda *_: 0.5)
    after, rows = join_all(bench, others, merged.plan, [left], Journal(), Bounds(bench.work))
    assert after.plan == others.plan and [row["ratio"] for row in rows] == [0.5]
    original = bench.originals["q1"].state_dict()
    assert all(torch.equal(after.states["q1"][name], original[name]) for name in original)
