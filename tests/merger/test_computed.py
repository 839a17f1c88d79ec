"""int8 weights computed in integers where a query holds so, and stored alone where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemel.merger import merge
from gemel.merger.computed import CALIBRATION_FRAMES, QueryNetwork, open_network
from gemel.merger.context import MergeContext
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.quantization import pack
from gemel.models.workload import Workload
from tests.merger.options import QUICK

COMPUTED = replace(QUICK, weights="int8", documents=True)


def packed_body(ctx: MergeContext, query: str):
    state = ctx.originals[query].state_dict()
    weights = {key: tensor for key, tensor in state.items() if key.startswith("body") and tensor.ndim == 4}
    return {key: pack(tensor, "int8") for key, tensor in weights.items()}


def test_merge_writes_ranges_with_which_every_query_holds(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, "none", options=COMPUTED)
    bundle = open_bundle(out)
    assert min(query.ratio for query in report.queries) >= 0.95 and verify_bundle(out) == []
    for query in bundle.queries:
        assert "int8" in {one.dtype for one in query.stored.values()}
        assert len(query.activations) > 1


def test_query_that_misses_in_integers_keeps_wide_activations_and_says_so(workload, tmp_path, monkeypatch) -> None:
    measure = QueryNetwork.measure
    monkeypatch.setattr(
        QueryNetwork, "measure", lambda self, frames: dict.fromkeys(measure(self, frames), (-1e-6, 1e-6))
    )
    report = merge(workload, tmp_path / "b.safetensors", "none", options=COMPUTED)
    bundle = open_bundle(tmp_path / "b.safetensors")
    assert all(query.stored and not query.activations for query in bundle.queries)
    notes = [note for note in report.notes if "activations stay in float32" in note]
    assert len(notes) == len(bundle.queries)


@pytest.mark.parametrize("is_computed", [False, True])
def test_session_answers_as_the_packed_model(ctx: MergeContext, is_computed: bool) -> None:
    model, packed = ctx.models(["q0"])["q0"].eval(), packed_body(ctx, "q0")
    with torch.no_grad():
        for key, weight in packed.items():
            model.state_dict()[key].copy_(weight.wide())
    network = open_network(ctx, "q0", model, packed)
    assert network is not None
    data = ctx.train["q0"]
    frames = data.frames(data.spread(CALIBRATION_FRAMES), ctx.device)
    ranges = network.measure(frames)
    assert ranges
    answers = network.answerer(model, ranges if is_computed else {})(frames)
    with torch.no_grad():
        expected = model(frames)
    error = float((answers - expected).norm() / expected.norm())
    assert error < (0.1 if is_computed else 1e-4)
    assert is_computed == (error > 1e-5)


def test_activations_that_need_more_bits_stay_wide_and_the_rest_is_computed(workload, tmp_path, monkeypatch) -> None:
    measure = QueryNetwork.measure

    def ruin_one(self: QueryNetwork, frames: torch.Tensor):
        ranges = measure(self, frames)
        return {**ranges, list(ranges)[-1]: (-1e-6, 1e-6)}

    monkeypatch.setattr(QueryNetwork, "measure", ruin_one)
    report = merge(workload, tmp_path / "b.safetensors", "none", options=COMPUTED)
    for query in open_bundle(tmp_path / "b.safetensors").queries:
        assert query.activations and (-1e-6, 1e-6) not in query.activations.values()
    assert [note for note in report.notes if "1 of its activations stay in float32" in note]
