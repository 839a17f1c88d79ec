"""Merges on a GPU made up: every tensor lies where what it meets lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gemel.merger import METHODS, MergeOptions, Recipe, TrainOptions, merge, train_originals
from gemel.merger.context import MergeContext
from gemel.models.bundle import verify_bundle
from gemel.models.workload import Workload, load_workload
from tests.fake_gpu import fake_gpu
from tests.merger.detector_workload import detector, write
from tests.merger.kills import kill_after, to_the_end
from tests.merger.tiny import write_workload
from tests.parameters import every

RECIPE = Recipe(rate=2e-3, epochs=2, batch=8, frames_per_epoch=16)
DETECTORS = (
    ("ssd_resnet18", 96), ("ssdlite320_mobilenet_v2", 320),
    ("fasterrcnn_mobilenet_v3_large_320_fpn", 320),
)  # fmt: skip


def test_fake_gpu_reports_operations_that_mix_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.ones(3)
    with fake_gpu(monkeypatch) as mixed:
        there = torch.zeros(3, device="cuda")
        assert (there + 1).device.type == "cuda" and there.cpu().device.type == "cpu" and not mixed
        there.copy_(here)
        assert torch.equal(there[torch.tensor([0])].cpu(), torch.ones(1)) and not mixed
        assert (there + here).device.type == "cuda"
        torch.nn.Linear(3, 2).to("cuda")(here)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
    assert [one.split()[0] for one in mixed] == ["add", "linear"] and "test_fake_gpu.py" in mixed[0]


@pytest.mark.parametrize("method", every(METHODS.names, few=("top-down",)))
def test_merge_keeps_tensors_on_their_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    workload = load_workload(write_workload(tmp_path, queries=3, frames=24))
    options = MergeOptions(
        RECIPE, max_minutes=2, accept_unproven=True, weights="int8" if method == "top-down" else "fp32"
    )

    with fake_gpu(monkeypatch) as mixed:
        train_originals(workload, options=TrainOptions(rate=3e-3, passes=48, min_epochs=1, max_cycles=2))
        merge(workload, tmp_path / "b.gemel", method, options=options)
    assert not mixed and verify_bundle(tmp_path / "b.gemel") == []


@pytest.mark.exhaustive
def test_merge_killed_often_keeps_tensors_on_their_device(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_chance: None,
) -> None:  # fmt: skip
    kill_after(monkeypatch, 5, again=True)
    options, out = MergeOptions(RECIPE, weights="int4", accept_unproven=True), tmp_path / "b.gemel"
    with fake_gpu(monkeypatch) as mixed:
        _, kills = to_the_end(lambda again: merge(workload, out, "top-down", resume=again, options=options))
    assert not mixed and verify_bundle(out) == [] and kills > 3


@pytest.mark.parametrize(("model", "size"), every(DETECTORS, few=(("ssd_resnet18", 96),)))
def test_detector_is_trained_and_evaluated_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, size: int
) -> None:
    workload = write(tmp_path, [detector("a", model, size)])
    with fake_gpu(monkeypatch) as mixed:
        ctx = MergeContext(workload)
        models = ctx.models(["a"])
        assert ctx.train["a"].prepared.keep_on(ctx.device) and next(models["a"].parameters()).is_cuda
        recipe = replace(RECIPE, rate=1e-4, epochs=1, batch=2, micro_batch=2, frames_per_epoch=2, features=1.0)
        ctx.training(models, replace(recipe, checkpointing=True)).epoch()
        ctx.recalibrate("a", models["a"], 2)
        assert ctx.ratio("a", models["a"]) >= 0
        ctx.match_scores("a", models["a"])
    assert not mixed
