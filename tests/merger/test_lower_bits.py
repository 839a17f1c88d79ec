"""Fewer bits as steps of a merge: as far as each query is proven, together with what it shares weights with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gemel.merger.acceptance as acceptance
import gemel.merger.lower_bits as lower_bits
from gemel.bundle_summary import summarize_bundle
from gemel.merger import MergeOptions, TopDownConfig, merge
from gemel.merger.acceptance import _align
from gemel.merger.checkpoint import Checkpoint, StepCache, snapshots
from gemel.merger.computed import are_alike
from gemel.merger.context import MergeContext, Merged
from gemel.merger.distributed import ProcessGroup
from gemel.merger.events import Change
from gemel.merger.merge import LOG_SUFFIX, MergeReport
from gemel.merger.methods.registry import METHODS, Method
from gemel.merger.quantize import Quantized
from gemel.merger.shipped import Shipped
from gemel.merger.verdict import TriedModel
from gemel.models.bits import AUTO_BITS, FP32
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Workload
from tests.merger.footage import add_footage
from tests.merger.options import QUICK
from tests.merger.tiny import data_of, weights_of

ENOUGH = 160
"""Clips of 20 s: blocks that prove three queries."""
AUTO = replace(QUICK, weights=AUTO_BITS, documents=True)
FACTORIES = ["tests.merger.tiny:tiny_net"]


def rows_of(report: MergeReport, key: str) -> list[dict[str, Any]]:
    """The rows of a merge's log that have this key."""
    lines = Path(f"{report.bundle}{LOG_SUFFIX}").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def merge_originals(workload: Workload, tmp_path: Path, options: MergeOptions = AUTO) -> MergeReport:
    """The originals in the fewest bits that hold."""
    return merge(workload, tmp_path / "b.safetensors", "none", options=options)


def test_default_merge_is_proven_in_fewer_bits_and_computed_so(workload: Workload, tmp_path: Path) -> None:
    report = merge_originals(add_footage(workload, ENOUGH), tmp_path, MergeOptions(documents=True))
    assert report.saved_fraction > 0.7 and report.met and verify_bundle(report.bundle, FACTORIES) == []
    for query in report.queries:
        assert query.state.value == "proven" and query.bits in ("int8", "int4") and query.in_integers
    steps = [row for row in rows_of(report, "taken") if row["step"] == "weights in int8"]
    assert {row["query"] for row in steps} == {"q0", "q1", "q2"}
    for row in steps:
        assert row["kept_bytes"] < row["saved_bytes"] and row["flops_per_s"] > 0 and row["agreement"] > 0.9
    shown = summarize_bundle(open_bundle(report.bundle))
    assert {row["bits"] for row in shown.to_json()["queries"]} == {query.bits for query in report.queries}
    assert "in integers" in shown.to_text()


def test_step_that_could_save_too_little_is_left_out_and_named(workload: Workload, tmp_path: Path) -> None:
    options = replace(AUTO, effort=0.04)
    report = merge_originals(workload, tmp_path, options)
    assert {query.bits for query in report.queries} == {"int8"}
    assert all(query.why_bits == "int4 could save too little beyond int8" for query in report.queries)
    (row,) = rows_of(report, "possible_bytes")
    assert row["step"] == "weights in int4" and row["possible_bytes"] > 0


def test_merge_out_of_time_keeps_its_bits_and_says_so(workload: Workload, tmp_path: Path) -> None:
    report = merge_originals(workload, tmp_path, replace(AUTO, max_minutes=0.0))
    assert {query.bits for query in report.queries} == {FP32}
    assert any("leaves too little for 'weights in int8'" in note for note in report.notes)


def ruin_rounding(workload: Workload, query: str) -> None:
    """A weight of 500 that no frame reaches: a scale that fits it rounds every other weight of its channel to 0."""
    path = weights_of(workload, query)
    state = load_file(path)
    state["stem.1.weight"][0], state["stem.1.bias"][0] = 0.0, -1.0
    state["body.0.weight"][:, 0] = 500.0
    save_file(state, path)


def test_layer_whose_rounding_ruins_a_model_has_more_bits_and_it_is_said(workload: Workload, tmp_path: Path) -> None:
    ruin_rounding(workload, "q0")
    report = merge_originals(workload, tmp_path)
    by_query = {query.id: query for query in open_bundle(report.bundle).queries}
    assert by_query["q0"].stored["body.0.weight"].dtype == "fp16"
    assert by_query["q2"].stored["body.0.weight"].dtype in ("int8", "int4")
    assert report.queries[0].ratio >= 0.95 and "rounding costs too much of body.0.weight" in report.queries[0].why_bits
    assert any(note.startswith("q0: rounding costs too much of body.0.weight") for note in report.notes)
    assert "q0 has no fewer bits: rounding" in summarize_bundle(open_bundle(report.bundle)).to_text()


def test_calibration_frames_that_are_all_alike_leave_activations_in_float32(workload: Workload, tmp_path: Path) -> None:
    first, *others = sorted((data_of(workload, "q0") / "train").rglob("*.png"))
    for path in others:
        shutil.copyfile(first, path)
    report = merge_originals(workload, tmp_path)
    by_query = {query.id: query for query in open_bundle(report.bundle).queries}
    assert by_query["q0"].stored and not by_query["q0"].activations and by_query["q1"].activations
    (note,) = (note for note in report.notes if note.startswith("q0: ") and "alike" in note)
    assert "all 60 train frames that could calibrate its activations are alike" in note


def test_frames_are_alike_up_to_noise() -> None:
    draws = torch.Generator().manual_seed(0)
    picture = torch.rand(1, 3, 16, 16, generator=draws)
    noise = torch.randn(8, 3, 16, 16, generator=draws)
    assert are_alike(picture + 0.002 * noise) and not are_alike(picture + 0.05 * noise)
    assert not are_alike(torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 4, 4))


def test_queries_that_share_weights_take_the_same_step() -> None:
    plan = SharingPlan(((("a", "x"), ("b", "x")), (("b", "y"), ("d", "y"))))
    steps = [Shipped(Merged(plan, {}))] * 3
    assert _align(steps, {"a": 2, "b": 1, "c": 2, "d": 2}, []) == {"a": 1, "b": 1, "c": 2, "d": 1}
    assert _align(steps, {"a": 2, "b": -1, "c": 0, "d": 2}, ["b"]) == {"a": 2, "c": 0, "d": 2}


def test_query_that_does_not_hold_in_int4_keeps_what_it_shares_in_int8(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(load_file(weights_of(workload, "q0")), weights_of(workload, "q2"))  # without the names of its classes
    try_model = acceptance._try_model

    def refuse_int4_of_q2(ctx: MergeContext, step: Shipped, cache: StepCache, query: str) -> TriedModel:
        trial = try_model(ctx, step, cache, query)
        return replace(trial, plain=0.0) if (query, step.bits) == ("q2", "int4") else trial

    monkeypatch.setattr(acceptance, "_try_model", refuse_int4_of_q2)
    only_identical = TopDownConfig(without=tuple(change for change in Change if change is not Change.IDENTICAL))
    report = merge(workload, tmp_path / "b.safetensors", options=replace(AUTO, top_down=only_identical))
    by_query = {query.id: query for query in open_bundle(report.bundle).queries}
    assert by_query["q0"].tensors == by_query["q2"].tensors and by_query["q0"].stored == by_query["q2"].stored
    assert [query.bits for query in report.queries] == ["int8", "int4", "int8"]
    assert report.queries[0].why_bits == "int4 would change what it shares with q2"
    assert report.queries[2].why_bits.startswith("int4 is not proven: needs ")


def test_original_that_is_back_has_fewer_bits_too(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ruined(Method):
        name = "ruined"

        def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
            states = snapshots(ctx.originals)
            states["q0"] = {key: torch.zeros_like(tensor) for key, tensor in states["q0"].items()}
            return Merged(SharingPlan(), states)

    monkeypatch.setitem(METHODS.added, "ruined", Ruined)
    report = merge(workload, tmp_path / "b.safetensors", "ruined", options=AUTO)
    assert any(note.startswith("q0: not proven") and "original is back" in note for note in report.notes)
    query = report.queries[0]
    assert query.bits in ("int8", "int4") and query.ratio >= 0.95


class SteppedClock:
    """Seconds of a merge in which each step of bits takes so many; the clock stands still otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: dict[str, float]) -> None:
        self.now, quantize = 0.0, lower_bits.quantize

        def take(ctx: MergeContext, merged: Merged, bits: Any, *rest: Any) -> Quantized:
            found = quantize(ctx, merged, bits, *rest)
            self.now += step_s[bits]
            return found

        monkeypatch.setattr(lower_bits, "quantize", take)
        monkeypatch.setattr(ProcessGroup, "clock", lambda group: self.now)
        monkeypatch.setattr(Checkpoint, "elapsed_s", property(lambda checkpoint: self.now))


@pytest.mark.parametrize(("int4_s", "minutes", "bits"), [(60, 1.5, "int8"), (60, 2.5, "int4"), (120, 2.5, "int8")])
def test_int4_begins_and_counts_only_where_it_ends_in_time(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int4_s: float, minutes: float, bits: str
) -> None:
    SteppedClock(monkeypatch, {"int8": 60.0, "int4": int4_s})
    report = merge_originals(workload, tmp_path, replace(AUTO, max_minutes=minutes))
    assert all(query.in_integers for query in report.queries)
    assert {query.bits for query in report.queries} == {bits}
    late = [row for row in rows_of(report, "out_of_budget") if row["out_of_budget"] == "weights in int4"]
    assert len(late) == (minutes == 1.5)
    if bits == "int8":
        assert all(query.why_bits == "the budget was over" for query in report.queries)
