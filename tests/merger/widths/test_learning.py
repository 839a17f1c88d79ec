"""Norms that learn what fewer bits have moved: nothing else moves, and what is learnt is what ships."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import merger.widths.search as search_module
import models.quantization as widths_module
from merger import merge
from merger.checkpoint import StepCache, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.training.loop import Training
from merger.training.recipe import Recipe
from merger.widths.learning import learn_norms, rest_codes
from merger.widths.search import fit_widths
from merger.widths.storing import Storage, store, tied_models
from models.bundle import open_bundle
from models.sharing.groups import groups
from models.sharing.plan import SharingPlan
from models.workload import Workload
from tests.merger.options import QUICK

FACTORIES = ["tests.merger.tiny:tiny_net"]
QUICKLY = Recipe(rate=3e-2, epochs=6, frames_per_epoch=240)


@pytest.fixture
def tied(ctx: MergeContext) -> Merged:
    """Every group tied, nothing trained."""
    plan = SharingPlan.of(groups(ctx.layers))
    return Merged(plan, {query: snapshot(model) for query, model in ctx.tied(plan, ctx.queries).items()})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short trainings; and codes that hurt the tiny network, which bears two bits otherwise, till its norms learn: few
    weights are told apart, and measuring again does not help.
    """
    calibrate = MergeContext.calibrate
    monkeypatch.setattr(search_module, "FIRST", QUICKLY)
    monkeypatch.setattr(search_module, "AGAIN", QUICKLY)
    monkeypatch.setattr("merger.widths.learning.HOPELESS", 0.0)
    monkeypatch.setattr(search_module.ForBits, "run", lambda *_: {"states": {}, "tried": []})
    monkeypatch.setattr(widths_module, "CLIPS", [0.03])
    monkeypatch.setattr(MergeContext, "calibrate", lambda *given: len(given) > 3 and calibrate(*given))


def test_only_what_is_a_querys_own_and_not_packed_learns(ctx: MergeContext, tied: Merged) -> None:
    model = tied_models(ctx, tied, ["q1"])["q1"]
    packed = ["last.0.weight", "head.weight"]
    before = snapshot(model)
    rest_codes("q1", model, tied.plan, packed)
    found = learn_norms(ctx, "q1", model, tied.plan, QUICKLY, 0.5, StepCache())
    shared = {f"{path}.weight" for members in tied.plan.shared for query, path in members if query == "q1"}
    assert shared and not found["norms"].keys() & {*packed, *shared}
    after = snapshot(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"last.1.weight", "last.1.bias", "last.1.running_mean", "head.bias"} <= moved <= found["norms"].keys()


@pytest.mark.parametrize(("reached", "counts"), [([0.5], 0.0), ([0.9, 0.99, 0.96], 0.96), ([0.96, 0.9, 0.91], 0.91)])
def test_the_end_of_a_training_counts_unless_it_is_hopeless(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, reached: list[float], counts: float
) -> None:
    ratios, asked = iter([*reached, 2.0]), []
    monkeypatch.setattr(ctx, "ratio", lambda *_: asked.append(1) or next(ratios))
    monkeypatch.setattr(ctx, "calibrate", lambda *_: False)
    monkeypatch.setattr("merger.training.loop.Training.epoch", _passes)
    found = learn_norms(ctx, "q1", ctx.models(["q1"])["q1"], SharingPlan(), Recipe(epochs=3), 0.95, StepCache())
    assert len(asked) == len(reached) and found["ratio"] == counts and (found["norms"] is None) == (counts == 0)


def _passes(training: Training) -> None:
    """An epoch in which nothing is learnt."""
    training.step += training.steps


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("learns", [True, False])
def test_what_norms_learn_keeps_weights_in_fewer_bits(
    ctx: MergeContext, monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    originals = Merged(SharingPlan(), {query: snapshot(model) for query, model in ctx.originals.items()})
    if not learns:
        monkeypatch.setattr(search_module, "learn_norms", lambda *_: {"ratio": 0.0, "norms": None})
    required = dict.fromkeys(ctx.queries, 0.9)
    found = fit_widths(ctx, originals, "int2", required, StepCache(), Budget(ctx.flops))
    first, ratios = found["rows"][0], {q: ratio for row in found["rows"] for q, ratio in row["ratios"].items()}
    assert bool(first["norms_learnt"]) == learns and (len(found["rows"]) == len(ctx.queries)) == learns
    assert min(ratios.values()) >= 0.9 and (set(found["stored_bytes"]) == {"int2", "fp16"}) == learns
    models = tied_models(ctx, originals, ctx.queries)
    store(models, Storage(**found["storage"]))
    assert {query: ctx.ratio(query, model) for query, model in models.items()} == pytest.approx(ratios)


@pytest.mark.usefixtures("quick")
def test_a_bundle_holds_what_norms_learnt(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "none", options=replace(QUICK, weights="int2", margin=0.0))
    rows = [json.loads(line) for line in Path(f"{report.bundle}.log.jsonl").read_text().splitlines()]
    learnt = [query for row in rows for query in row.get("norms_learnt", ())]
    bundle, ctx = open_bundle(report.bundle, FACTORIES), MergeContext(workload)
    assert learnt
    for query in learnt:
        own, original = bundle.build(query).state_dict(), ctx.originals[query].state_dict()
        assert not torch.equal(own["last.1.weight"], original["last.1.weight"])
