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

from merger import merge
from merger.context import MergeContext, Merged
from merger.methods.registry import MergeTask
from merger.methods.top_down import whole_plan
from models.bundle import open_bundle
from models.sharing.groups import ceiling_bytes
from models.workload import Workload, load_workload
from tests.merger.guarantees import must_train, ratios_on_val
from tests.merger.kills import kill_after, store_at_every_chance, to_the_end
from tests.merger.options import LAYERS, QUICK
from tests.merger.tiny import weights_of

HARD = replace(QUICK, recipe=replace(QUICK.recipe, epochs=3, frames_per_epoch=32))
STAGES = ("share_identical", "freeze_donor_first", "train_jointly", "repair", "share_half")


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
    assert any(row.get("training") == "joint" for row in rows) == trains
    assert {row["outcome"] for row in rows if "set" in row} <= {"kept", "partly", "refused"}


@pytest.mark.parametrize("stage", STAGES)
def test_top_down_any_stage_off_keeps_every_target(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    must_train(monkeypatch)
    options = replace(HARD, top_down=replace(LAYERS, **{stage: False}))
    out = tmp_path / "b.safetensors"
    merge(workload, out, options=options)
    assert min(ratios_on_val(workload, out).values()) >= 0.95


def test_top_down_all_stages_off_shares_nothing(workload: Workload, tmp_path: Path) -> None:
    options = replace(QUICK, margin=1.0, top_down=replace(LAYERS, **dict.fromkeys(STAGES, False)))
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
    texts: list[str] = []
    report = merge(
        workload, tmp_path / "b.safetensors", options=replace(QUICK, min_saving=0.99),
        progress=lambda event, **fields: texts.append(fields["text"]) if event == "warning" else None,
    )  # fmt: skip
    assert report.saved_fraction < 0.01 and any("no two models have a layer in common" in text for text in texts)


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
    assert [row["repair"] for row in rows if row.get("query") == "q1" and "repair" in row][-1] == "original"
    obstacles = [row["in_the_way"]["q1"] for row in rows if "set" in row]
    assert obstacles and all(one["ratio"] == 0.1 for one in obstacles)


@pytest.mark.parametrize(("minutes", "flops"), [(0.0, None), (None, 1.0)])
def test_budget_of_nothing_trains_nothing_and_says_so(
    workload: Workload, tmp_path: Path, minutes: float | None, flops: float | None
) -> None:
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=replace(QUICK, max_minutes=minutes, max_flops=flops))
    assert report.saved_fraction < 0.01 and all(query.ratio == 1.0 for query in report.queries)
    assert any("FLOPs reach no training" in note for note in report.notes)
    assert any("the budget: ended" in note and "could save up to" in note for note in report.notes)
    assert {row["outcome"] for row in rows_of(out) if "set" in row} == {"untried"}


def test_budget_below_an_epoch_keeps_what_holds_untrained(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gemel", "joint_training"):
        monkeypatch.setattr(f"merger.methods.{module}.tie_and_evaluate", _nothing_holds)
    ctx = MergeContext(workload)
    flops = ctx.flops.of(ctx.queries["q1"]) * 12000.0
    report = merge(workload, tmp_path / "b.safetensors", options=replace(QUICK, max_flops=flops))
    assert report.saved_fraction > 0 and report.flops <= 2 * flops


def _nothing_holds(*given: Any) -> Any:
    from merger.evaluate import tie_and_evaluate

    models, ratios = tie_and_evaluate(*given)
    return models, dict.fromkeys(ratios, 0.1)


def test_end_that_saves_less_restores_the_best_state(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(task: MergeTask, merged: Merged, ratios: dict[str, float]) -> Merged:
        return Merged(merged.plan.without(*ratios), {})

    monkeypatch.setattr("merger.methods.joint_training.repair_queries", lose)
    must_train(monkeypatch)
    out = tmp_path / "b.safetensors"
    report = merge(workload, out, options=HARD)
    (row,) = [row for row in rows_of(out) if "accepted_bytes" in row]
    assert row["instead_of_bytes"] == 0 < row["accepted_bytes"] and report.saved_fraction > 0


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


def test_kin_start_is_told(workload: Workload, tmp_path: Path) -> None:
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
    events: list[tuple[str, dict]] = []
    merge(
        load_workload(workload.path), tmp_path / "b.safetensors", options=QUICK,
        progress=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    (ancestry,) = [fields for event, fields in events if event == "ancestry"]
    assert ancestry["kin"]


def test_speed_of_folded_originals_is_known(workload: Workload) -> None:
    ctx = MergeContext(workload)
    for model in ctx.originals.values():
        for name, buffer in model.named_buffers():
            buffer.fill_(0.0 if name.endswith("mean") else 1)
    ctx.open()
    assert all(one.eval_norms for one in ctx.references.values()) and 0 < ctx.speed < math.inf
