"""Quantisation of a merge: the fewest bits with which every query holds on val."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemel.merger.quantize as quantize_module
from gemel.merger import merge
from gemel.merger.budget import Budget
from gemel.merger.checkpoint import Checkpoint, StepCache, snapshots
from gemel.merger.context import MergeContext, Merged
from gemel.merger.quantize import (
    QuantizeConfig,
    Quantized,
    _Fit,
    max_flops,
    pack_models,
    quantizable_weights,
    quantize,
    tied_models,
)
from gemel.models.bits import Bits
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Workload
from tests.merger.kills import kill_after, to_the_end
from tests.merger.options import QUICK


@pytest.fixture
def originals(ctx: MergeContext) -> Merged:
    """The originals, nothing shared."""
    return Merged(SharingPlan(), snapshots(ctx.originals))


@pytest.fixture
def shared_bodies(ctx: MergeContext) -> Merged:
    """q1 and q2 get q0's body, and q1 and q2 share it."""
    plan = SharingPlan(((("q1", "body.0"), ("q2", "body.0")),))
    states = snapshots(ctx.originals)
    for query in ("q1", "q2"):
        states[query] = {**states[query], "body.0.weight": states["q0"]["body.0.weight"]}
    return Merged(plan, states)


def run(
    ctx: MergeContext, merged: Merged, bits: Bits, required: float = 0.95, budget: Budget | None = None
) -> Quantized:
    """The search with one requirement for all."""
    needs = dict.fromkeys(ctx.queries, required)
    return quantize(ctx, merged, bits, needs, StepCache(), budget or Budget(ctx.flops), ratios_of(ctx, merged))


def ratios_of(ctx: MergeContext, merged: Merged) -> dict[str, float]:
    """In float32."""
    return {query: ctx.ratio(query, model) for query, model in tied_models(ctx, merged, ctx.queries).items()}


def dictate(monkeypatch: pytest.MonkeyPatch, ratio: Any) -> list[tuple[str, Mapping[str, str]]]:
    """Replace the evaluation of a query by `ratio(query, bits)`; returns the calls."""
    calls: list[tuple[str, Mapping[str, str]]] = []

    def fit(self: Any, cache: StepCache, query: str, bits: Mapping[str, Bits], need: float) -> _Fit:
        calls.append((query, bits))
        return _Fit(ratio(query, bits))

    monkeypatch.setattr(quantize_module._Search, "_fit", fit)
    return calls


@pytest.mark.parametrize("bits", ["int4", "int8", "fp16"])
def test_originals_are_stored_in_the_requested_bits(ctx: MergeContext, originals: Merged, bits: Bits) -> None:
    found = run(ctx, originals, bits, 0.5)
    weights = quantizable_weights(ctx, originals, bits)
    assert found.nbytes == sum(weight.nbytes for weight in weights)
    assert {bits} <= {width for own in found.bits.values() for width in own.values()} <= {bits, "fp16"}
    heads = {found.bits[query]["head.weight"] for query in ctx.queries}
    assert heads == {"fp16"} and all("1.weight" not in key for own in found.bits.values() for key in own)


def test_shared_weight_is_packed_once(ctx: MergeContext, shared_bodies: Merged) -> None:
    found = run(ctx, shared_bodies, "int8", 0.5)
    models = tied_models(ctx, shared_bodies, ctx.queries)
    packed = pack_models(models, found)
    assert packed["q1"]["body.0.weight"] is packed["q2"]["body.0.weight"]
    assert packed["q0"]["body.0.weight"] is not packed["q1"]["body.0.weight"]
    wide = packed["q1"]["body.0.weight"].wide()
    assert all(torch.equal(models[query].get_parameter("body.0.weight"), wide) for query in ("q1", "q2"))


@torch.no_grad()
def test_codes_in_int4_keep_what_the_first_query_of_a_weight_answers(ctx: MergeContext, shared_bodies: Merged) -> None:
    found = run(ctx, shared_bodies, "int4", 0.0)
    assert torch.equal(found.codes["q1"]["body.0.weight"], found.codes["q2"]["body.0.weight"])
    (whole,), (nearest,), (rounded,) = (tied_models(ctx, shared_bodies, ["q1"]).values() for _ in range(3))
    pack_models({"q1": nearest}, replace(found, codes={}))
    pack_models({"q1": rounded}, found)
    frames = ctx.train["q1"].frames(range(48))
    before, *after = (model.eval()(frames) for model in (whole, nearest, rounded))
    errors = [float((outputs - before).square().mean()) for outputs in after]
    assert errors[1] < 0.7 * errors[0]


def test_most_sensitive_weight_is_widened_first(
    ctx: MergeContext, originals: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = {"last.0.weight": "int4"}.items()
    calls = dictate(monkeypatch, lambda query, bits: 0.9 if query == "q0" and narrow <= bits.items() else 1)
    monkeypatch.setattr(
        quantize_module._Search, "_sensitivities",
        lambda self, weights, cache, query: [float(weight.places[0][1] == "last.0.weight") for weight in weights],
    )  # fmt: skip
    found = run(ctx, originals, "int4")
    assert found.bits["q0"]["last.0.weight"] == "int8" and found.bits["q0"]["body.0.weight"] == "int4"
    assert found.bits["q1"]["last.0.weight"] == "int4"
    assert all(found.ratios[query] >= found.needs[query] for query in ctx.queries) and len(calls) < 12


def test_shared_weight_widens_for_all_and_they_are_evaluated_again(
    ctx: MergeContext, shared_bodies: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = {"body.0.weight": "int8"}.items()
    calls = dictate(monkeypatch, lambda query, bits: 0.9 if query == "q1" and narrow <= bits.items() else 1)
    found = run(ctx, shared_bodies, "int8")
    assert found.bits["q1"]["body.0.weight"] == found.bits["q2"]["body.0.weight"] == "fp16"
    assert found.bits["q0"]["body.0.weight"] == "int8" and calls[-1][0] == "q2"


def test_query_that_never_holds_ends_in_float32(
    ctx: MergeContext, originals: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictate(monkeypatch, lambda query, bits: 0.5 if bits and query == "q1" else 1)
    found = run(ctx, originals, "int4", budget=Budget(ctx.flops, max_flops=0))
    assert "q1" not in found.bits and found.bits["q0"]["body.0.weight"] == "int4"


def test_weight_too_large_for_fp16_is_not_stored_so(ctx: MergeContext, originals: Merged) -> None:
    originals.states["q0"]["head.weight"][0, 0] = 1e5
    weights = {weight.places[0]: weight for weight in quantizable_weights(ctx, originals, "int8")}
    assert ("q0", "head.weight") not in weights and "fp16" in weights["q1", "head.weight"].options


def test_norms_are_tuned_and_shared_weights_stay(
    ctx: MergeContext, shared_bodies: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = QuantizeConfig()
    quick = replace(config.tune, epochs=2, frames_per_epoch=32, rate=1e-3)
    monkeypatch.setattr(quantize_module, "CONFIG", replace(config, tune=quick, hopeless_fraction=0.0))
    search = quantize_module._Search(ctx, shared_bodies, "int8", {}, StepCache(), Budget(ctx.flops), {})
    bits: dict[str, Bits] = {"last.0.weight": "int8"}
    model = search._model("q1", bits)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = search._tune_norms(StepCache(), "q1", model, bits, 0.5)
    assert found.tuned and found.norms and {"body.0.weight", "last.0.weight"}.isdisjoint(found.norms)
    assert not torch.equal(found.norms["last.1.weight"], before["last.1.weight"])
    assert torch.equal(model.get_parameter("body.0.weight"), before["body.0.weight"])


def test_short_query_is_recalibrated_then_tuned(ctx: MergeContext, originals: Merged) -> None:
    """int4 with an unreachable requirement goes through every repair; what is stored is what was evaluated."""
    found = run(ctx, originals, "int4", 0.97)
    models = tied_models(ctx, originals, ctx.queries)
    pack_models(models, found)
    last = found.ratios
    assert {query: ctx.ratio(query, models[query]) for query in last} == last and max_flops(ctx) > 0


def test_resumed_quantisation_gives_the_same_result(
    ctx: MergeContext, originals: Merged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_chance: None
) -> None:
    needs, wide = dict.fromkeys(ctx.queries, 0.97), ratios_of(ctx, originals)
    straight = run(ctx, originals, "int4", 0.97)
    kill_after(monkeypatch, 2, again=True)

    def search(again: bool) -> Quantized:
        cache = Checkpoint(tmp_path / "work", {}, again)
        return cache.step("q", lambda: quantize(ctx, originals, "int4", needs, cache, Budget(ctx.flops), wide))

    found, kills = to_the_end(search)
    assert kills > 2 and found.bits == straight.bits and found.nbytes == straight.nbytes
    assert all(torch.equal(t, straight.norms[q][name]) for q, own in found.norms.items() for name, t in own.items())


@pytest.mark.parametrize(("method", "bits"), [("none", "int8"), ("top-down", "int4")])
def test_merge_with_weights_option_keeps_the_targets(
    workload: Workload, tmp_path: Path, method: str, bits: Bits
) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, method, options=replace(QUICK, weights=bits))
    assert verify_bundle(out) == [] and report.saved_fraction > (0.6 if method == "none" else 0.7)
    ctx, bundle = MergeContext(workload), open_bundle(out, ["tests.merger.tiny:tiny_net"])
    assert all(ctx.ratio(query.id, bundle.build(query.id)) >= 0.95 for query in bundle.queries)
