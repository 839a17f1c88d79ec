"""The default method: its stages, its fallback, its budget, and its resumption."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gemel.merger import merge
from gemel.merger.checkpoint import snapshots
from gemel.merger.context import MergeContext
from gemel.merger.events import Change
from gemel.merger.init.start import order_donors
from gemel.merger.methods.ladder import NOTHING, MergeCandidate
from gemel.merger.methods.registry import MergeTask
from gemel.merger.methods.substitute import Networks
from gemel.merger.methods.top_down import open_search, whole_plan
from gemel.models.bundle import open_bundle
from gemel.models.sharing.groups import ceiling_bytes
from gemel.models.workload import Workload, load_workload
from tests.merger.guarantees import FACTORIES, must_train, ratios_on_val
from tests.merger.kills import kill_after, store_at_every_chance, to_the_end
from tests.merger.options import LAYERS, NETWORKS, QUICK
from tests.merger.tiny import weights_of

HARD = replace(QUICK, recipe=replace(QUICK.recipe, epochs=3, frames_per_epoch=32))
STEPS = (Change.IDENTICAL, Change.PRIVATE, Change.LAYERS, Change.HALF)


def rows_of(bundle: Path) -> list[dict[str, Any]]:
    """The rows of the log beside a bundle."""
    return [json.loads(line) for line in Path(f"{bundle}.log.jsonl").read_text().splitlines()]


def test_whole_plan_without_minimum_saves_the_bound(ctx: MergeContext) -> None:
    assert whole_plan(ctx, QUICK).saved_bytes(ctx.layers) == ceiling_bytes(ctx.layers)
    assert not whole_plan(ctx, replace(QUICK, min_saving=0.9)).shared


@pytest.mark.parametrize("trains", [False, True])
def test_top_down_tiny_workload_reaches_the_bound(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    if trains:
        must_train(monkeypatch)
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=QUICK)
    assert report.method == "top-down" and report.saved_fraction > 0.95 * report.ceiling_fraction
    assert min(ratios_on_val(workload, out).values()) >= 0.95
    rows = rows_of(out)
    assert not trains or any(query.trained for query in open_bundle(out, FACTORIES).queries)
    assert {row["outcome"] for row in rows if "set" in row} <= {"kept", "partly", "refused"}


@pytest.mark.parametrize("step", STEPS)
def test_top_down_any_step_off_keeps_every_target(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Change
) -> None:
    must_train(monkeypatch)
    options = replace(HARD, top_down=replace(LAYERS, without=(*NETWORKS, step)))
    out = tmp_path / "b.safetensors"
    merge(workload, out, options=options)
    assert min(ratios_on_val(workload, out).values()) >= 0.95


def test_top_down_all_steps_off_shares_nothing(workload: Workload, tmp_path: Path) -> None:
    options = replace(QUICK, margin=1.0, top_down=replace(LAYERS, without=tuple(Change)))
    report = merge(workload, tmp_path / "b.safetensors", options=options)
    assert report.saved_fraction < report.ceiling_fraction and all(query.ratio >= 0.9 for query in report.queries)


def test_identical_models_are_shared_without_training(workload: Workload, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(weights_of(workload, "q0")), weights_of(workload, "q2"))
    document = yaml.safe_load(workload.path.read_text())
    document["queries"] = [document["queries"][0], document["queries"][2]]
    workload.path.write_text(yaml.safe_dump(document))
    out = tmp_path / "b.safetensors"
    report = merge(load_workload(workload.path), out, options=QUICK)
    assert report.saved_fraction == pytest.approx(0.5, abs=0.02)
    rows = rows_of(out)
    assert next(row["identical"] for row in rows if "identical" in row) == ["q0", "q2"]
    assert {row["outcome"] for row in rows if "set" in row} == {"kept"}


def test_models_without_common_layers_keep_their_originals(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=replace(QUICK, min_saving=0.99))
    assert report.saved_fraction < 0.01 and any("no two models have a layer in common" in text for text in report.notes)


def test_step_that_costs_more_than_it_could_save_is_left_out(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=replace(QUICK, effort=1e-3))
    assert report.saved_fraction < 0.01
    left_out = [row for row in rows_of(out) if "possible_bytes" in row]
    assert {row["step"] for row in left_out} >= {Change.PRIVATE.value, Change.LAYERS.value}
    assert all(row["possible_bytes"] < row["price_bytes"] for row in left_out if row["possible_bytes"])


def test_unshared_query_has_its_original_bit_by_bit(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_train(monkeypatch)
    ratio = MergeContext.ratio
    monkeypatch.setattr(
        MergeContext, "ratio", lambda self, query, model, **_: 0.1 if query == "q1" else ratio(self, query, model)
    )
    out = tmp_path / "b.safetensors"
    merge(workload, out, options=HARD)
    bundle, ctx = open_bundle(out, ["tests.merger.tiny:tiny_net"]), MergeContext(workload)
    state, original = bundle.build("q1").state_dict(), ctx.originals["q1"].state_dict()
    assert all(torch.equal(state[name], original[name]) for name in original)
    rows = rows_of(out)
    assert not any(row["taken"] for row in rows if row.get("query") == "q1" and "step" in row)
    obstacles = [row["in_the_way"]["q1"] for row in rows if "set" in row]
    assert obstacles and all(one["ratio"] == 0.1 for one in obstacles)


@pytest.mark.parametrize(("minutes", "flops"), [(0.0, None), (None, 1.0)])
def test_budget_of_nothing_trains_nothing_and_says_so(
    workload: Workload, tmp_path: Path, minutes: float | None, flops: float | None
) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=replace(QUICK, max_minutes=minutes, max_flops=flops))
    assert report.saved_fraction < 0.01 and all(query.ratio == 1.0 for query in report.queries)
    assert any("the budget: leaves too little for" in note and "could save up to" in note for note in report.notes)
    assert {row["outcome"] for row in rows_of(out) if "set" in row} == {"untried"}


def test_time_that_ends_in_an_epoch_keeps_what_holds(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_train(monkeypatch)
    ctx = MergeContext(workload)
    flops = ctx.flops.of(ctx.queries["q1"]) * 14000.0
    report = merge(workload, tmp_path / "b.safetensors", options=replace(QUICK, max_flops=flops))
    assert report.flops <= 1.2 * flops and all(query.ratio >= 0.9 for query in report.queries)


def test_step_that_changes_more_must_save_more(task: MergeTask) -> None:
    search = open_search(task, QUICK, Networks(), NOTHING)
    states = snapshots(task.ctx.originals)
    less, more = (MergeCandidate(task.plan, dict(states), {}, {"q0": ratio}) for ratio in (0.96, 1.0))
    assert search.offer(less, more).best.ratios == {"q0": 0.96}
    assert search.offer(NOTHING, more).best.ratios == {"q0": 1.0}


def test_detector_gives_its_weights_and_keeps_them(task: MergeTask) -> None:
    task.ctx.queries = {**task.ctx.queries, "q2": replace(task.ctx.queries["q2"], task="detection")}
    assert order_donors(task.ctx, task.plan, {})[0] == "q2"
    assert order_donors(task.ctx, task.plan, {"q1": {}})[0] == "q1"


def test_killed_merge_resumes_to_the_same_bundle(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_train(monkeypatch)
    straight = tmp_path / "straight.safetensors"
    merge(workload, straight, options=HARD)
    store_at_every_chance(monkeypatch)
    kill_after(monkeypatch, 7, again=True)
    out = tmp_path / "killed.safetensors"
    _, kills = to_the_end(lambda again: merge(workload, out, resume=again, options=HARD))
    assert kills > 3 and out.read_bytes() == straight.read_bytes()
    assert rows_of(out) == rows_of(straight)


def test_kin_share_the_mean_of_their_weights_untrained(workload: Workload, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(weights_of(workload, "q0"))
    noise = torch.Generator().manual_seed(0)
    for tensor in state.values():
        if tensor.ndim > 1:
            tensor += 0.05 * tensor.std() * torch.randn(tensor.shape, generator=noise)
    save_file(state, weights_of(workload, "q2"))
    document = yaml.safe_load(workload.path.read_text())
    document["queries"] = [document["queries"][0], document["queries"][2]]
    workload.path.write_text(yaml.safe_dump(document))
    out = tmp_path / "b.safetensors"
    report = merge(load_workload(workload.path), out, options=QUICK)
    steps = [row for row in rows_of(out) if "ratio" in row and "step" in row]
    assert {row["step"] for row in steps} == {Change.MEAN.value} and all(row["taken"] for row in steps)
    assert report.saved_fraction > 0.4


def test_speed_of_folded_originals_is_known(workload: Workload) -> None:
    ctx = MergeContext(workload)
    for model in ctx.originals.values():
        for name, buffer in model.named_buffers():
            buffer.fill_(0.0 if name.endswith("mean") else 1)
    ctx.open()
    assert all(one.eval_norms for one in ctx.references.values()) and 0 < ctx.speed < math.inf
