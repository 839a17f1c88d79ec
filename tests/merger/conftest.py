"""A tiny workload with trained originals, made once for all tests of the merger."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import benchmarks.merging.rivals  # noqa: F401  (adds the methods `ceiling` and `joint`)
from gemel.merger import TopDownConfig, TrainOptions, train_originals
from gemel.merger.budget import Budget
from gemel.merger.checkpoint import StepCache, snapshots
from gemel.merger.context import MergeContext, Merged
from gemel.merger.init.average import copy_donor_weights
from gemel.merger.methods.registry import MergeTask
from gemel.merger.methods.top_down import whole_plan
from gemel.merger.training.recipe import Recipe
from gemel.models.workload import Workload, load_workload
from tests.merger.kills import store_at_every_chance
from tests.merger.options import QUICK
from tests.merger.tiny import SEED, write_workload

torch.set_num_threads(1)
ORIGINALS = TrainOptions(rate=3e-3, passes=360, max_cycles=1)


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workload of three queries whose originals are trained."""
    folder = tmp_path_factory.mktemp("tiny")
    train_originals(load_workload(write_workload(folder, queries=3)), seed=SEED, options=ORIGINALS)
    return folder


@pytest.fixture
def workload(trained_folder: Path, tmp_path: Path) -> Workload:
    """A copy of the trained workload that a test may damage."""
    shutil.copytree(trained_folder, tmp_path / "tiny")
    return load_workload(tmp_path / "tiny" / "workload.yaml")


@pytest.fixture
def ctx(workload: Workload) -> MergeContext:
    """That workload with its originals loaded."""
    return MergeContext(workload)


@pytest.fixture
def untrained_merge(ctx: MergeContext) -> Merged:
    """All tied with q0's weights, nothing retrained."""
    plan = whole_plan(ctx, QUICK)
    models = ctx.tie_models(
        plan, list(ctx.queries), copy_donor_weights(plan, snapshots(ctx.originals), ["q0", "q1", "q2"])
    )
    return Merged(plan, snapshots(models))


@pytest.fixture
def every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is stored at every chance."""
    store_at_every_chance(monkeypatch)


@pytest.fixture
def task(ctx: MergeContext) -> MergeTask:
    """Stages of the default method on all layers, to 0.95, without a budget; log rows are in `task.checkpoint.log`."""
    plan, required = whole_plan(ctx, QUICK), dict.fromkeys(ctx.queries, 0.95)
    recipe = Recipe(rate=2e-3, epochs=2, frames_per_epoch=32)
    return MergeTask(ctx, plan, recipe, required, required, Budget(ctx.flops), StepCache(), TopDownConfig())
