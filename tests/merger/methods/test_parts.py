"""Parts of models that answer others' questions as they are: what is merged before anything is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import merger.methods.top_down as wide_module
from merger import merge
from merger.checkpoint import Checkpoint, snapshots
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions
from merger.methods.parts import Parts
from merger.methods.sprints import Sprints, Trained
from merger.methods.top_down import wide
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from models.workload import Workload

OPTIONS = MergeOptions(Recipe(rate=1e-3, epochs=1), choose_rate=False, precision="fp32", margin=0.0)


@pytest.fixture
def parts(ctx: MergeContext, sprints: Sprints) -> Parts:
    """What the tiny models could take from each other, if very little were required."""
    sprints.checkpoint.meter = ctx.flops
    return Parts(ctx, sprints.plan, dict.fromkeys(ctx.queries, 0.0), sprints.checkpoint, sprints.budget)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models' questions differ by the names of their classes alone; let them be one."""
    monkeypatch.setattr(Parts, "one_question", lambda *_: True)


@pytest.mark.usefixtures("alike")
def test_who_is_answered_takes_all_from_the_largest_and_is_judged_as_it_then_stands(
    parts: Parts, ctx: MergeContext
) -> None:
    merged, originals = parts.answered(), snapshots(ctx.originals)
    rows = parts.checkpoint.log
    assert [(row["takes"], row["from"], row["epochs"]) for row in rows] == [("q0", "q1", 0), ("q2", "q1", 0)]
    assert rows[-1]["accepted_bytes"] == merged.plan.saved_bytes(ctx.layers) > rows[0]["accepted_bytes"] > 0
    assert all(torch.equal(merged.states["q1"][key], tensor) for key, tensor in originals["q1"].items())
    for members in merged.plan.shared:
        weights = [merged.states[query][weight_key(merged.states[query], path)] for query, path in members]
        assert all(torch.equal(weight, weights[0]) for weight in weights)
    models = ctx.models(merged.plan.queries(), merged.states, merged.plan)
    assert [ctx.ratio(row["takes"], models[row["takes"]]) for row in rows] == [row["ratio"] for row in rows]


@pytest.mark.usefixtures("alike")
def test_who_falls_short_gives_to_those_after_it(parts: Parts) -> None:
    unmet = replace(parts, required={**parts.required, "q0": 2.0})
    merged = unmet.answered()
    assert [row["takes"] for row in parts.checkpoint.log] == ["q2"] and "q0" not in merged.plan.queries() - {
        parts.checkpoint.log[0]["from"]
    }
    assert not replace(parts, required=dict.fromkeys(parts.required, 2.0)).answered().plan.shared


@pytest.mark.parametrize("why", ["another question", "no work left"])
def test_nobody_is_judged_in_vain(parts: Parts, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    before = ctx.flops.total
    if why == "no work left":
        monkeypatch.setattr(Parts, "one_question", lambda *_: True)
        parts = replace(parts, budget=Budget(ctx.flops, before))
    assert not parts.answered().plan.shared and ctx.flops.total == before and not parts.checkpoint.log


@pytest.mark.usefixtures("alike")
def test_what_was_judged_before_an_interruption_is_not_judged_again(parts: Parts, ctx: MergeContext) -> None:
    wanted = parts.answered()
    parts.checkpoint.write()
    flops, over = ctx.flops.total, Budget(ctx.flops, 0.0)
    again = replace(parts, checkpoint=Checkpoint(parts.checkpoint.folder, {}, True), budget=over)
    found = again.answered()
    assert found.plan == wanted.plan and ctx.flops.total == flops, "also where the merge is to end at once"
    assert [row["ratio"] for row in again.checkpoint.log] == [row["ratio"] for row in parts.checkpoint.log]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.usefixtures("alike")
def test_what_is_answered_untrained_is_the_merge_where_training_saves_less(
    parts: Parts, ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trains: bool
) -> None:
    required = 2.0 if trains else 0.0
    monkeypatch.setattr(MergeOptions, "required", lambda *_: {**parts.required, "q2": required})
    ratios, nothing = dict.fromkeys(ctx.queries, 0.5), Merged(SharingPlan(), {})
    trained = Trained(parts.plan, snapshots(ctx.originals), ratios, Recipe(), (), 1, nothing)
    monkeypatch.setattr(wide_module, "_trained", lambda *_: trained if trains else pytest.fail("it trained"))
    monkeypatch.setattr(wide_module, "mend_all", lambda *_: (Merged(SharingPlan(), snapshots(ctx.originals)), []))
    checkpoint = Checkpoint(tmp_path / "merge", {}, False)
    merged = wide(ctx, OPTIONS, checkpoint)
    assert merged.plan.queries() == ({"q0", "q1"} if trains else {"q0", "q1", "q2"})
    left = [row["query"] for row in checkpoint.log if row.get("repair") == "leaves"]
    assert left == (["q2"] if trains else [])
    tried = wide_module._sets_tried(ctx, OPTIONS, checkpoint.log, 1.0)
    assert {trial.members for trial in tried} == set(merged.plan.shared)


@pytest.mark.usefixtures("alike")
def test_a_merge_that_trains_nothing_is_whole_and_accounts_for_all(workload: Workload, tmp_path: Path) -> None:
    easy = tuple(replace(query, accuracy_target=0.01) for query in workload.queries)
    report = merge(replace(workload, queries=easy), tmp_path / "b.gemel", "top-down", options=OPTIONS)
    assert report.saved_fraction >= report.ceiling_fraction, "heads and norms that are equal, too, are stored once"
    assert not any("epoch" in row for row in rows_of(tmp_path / "b.gemel.log.jsonl"))
    kept = [row for row in rows_of(tmp_path / "b.gemel.log.jsonl") if "set" in row]
    assert {row["outcome"] for row in kept} == {"kept"} and len(
        {query for row in kept for query, _ in row["kept"]}
    ) == 3


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]
