"""A worker's workbench: it loads what is asked for, judges alike, refuses other files; threads stay as they were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from merger import Resources
from merger.checkpoint import Checkpoint, StepCache
from merger.core.context import MergeContext
from merger.core.elsewhere import Desk, Setup, employed
from merger.core.inputs import LazyDict
from merger.events import silent
from merger.jobs import Job, Threads, run_jobs
from merger.training.recipe import Recipe
from merger.training.step_config import StepConfig
from models.errors import InputError
from models.workload import Workload
from tests.merger.tiny import weights_of


def test_a_workers_workbench_loads_what_is_asked_for_and_judges_alike(ctx: MergeContext) -> None:
    lazy = Setup.of(ctx).workbench(silent)
    assert lazy.ratio("q1", lazy.models(["q1"])["q1"]) == ctx.ratio("q1", ctx.models(["q1"])["q1"]) == 1.0
    parts = (lazy.originals, lazy.val, lazy.train)
    assert [sorted(part._made) for part in parts if isinstance(part, LazyDict)] == [["q1"], ["q1"], []]


def test_a_node_with_other_weights_is_named_with_the_file(ctx: MergeContext, workload: Workload) -> None:
    setup, path = Setup.of(ctx), weights_of(workload, "q1")
    path.write_bytes(weights_of(workload, "q0").read_bytes())
    with pytest.raises(InputError, match=r"has other weights in .*q1\.safetensors \(query q1\); the workload's files"):
        Desk(setup, silent)
    path.unlink()
    with pytest.raises(InputError, match=r"has no .*q1\.safetensors \(query q1\)"):
        Desk(setup, silent)


def _recipe(ctx: MergeContext, journal: StepCache) -> Recipe:
    return ctx.training(ctx.models(["q0"]), Recipe()).recipe


def test_a_worker_lays_its_steps_out_as_the_merge_does(ctx: MergeContext) -> None:
    desk, told = Desk(Setup.of(ctx), silent), list[Any]()
    workers: Any = SimpleNamespace(does_all=True)
    workers.do = lambda jobs, order, arrived: told.extend(desk.do(job, order).value for job in jobs)
    ctx.workers = workers
    ctx.fitting.take(StepConfig(8, False, True))
    found = run_jobs(ctx, StepCache(), "jobs", [Job("a", _recipe, {}, ("q0",))])
    assert found == told == [Recipe(node=8, recompute=True)]


def test_threads_stay_those_that_a_merge_began_with(ctx: MergeContext, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "flops", {}, resume=False)
    for resources in (Resources(threads=3), Resources()):
        with employed(ctx, resources, checkpoint):
            assert ctx.threads == Threads(3, 3) and ctx.workers is None
    with (
        pytest.raises(InputError, match="this merge began with 3 threads, 3 for each of several jobs; go on with"),
        employed(ctx, Resources(threads=2), checkpoint),
    ):
        pass


def test_without_threads_asked_for_torch_decides(ctx: MergeContext, tmp_path: Path) -> None:
    with employed(ctx, Resources(), Checkpoint(tmp_path / "flops", {}, resume=False)):
        assert ctx.threads == Threads(torch.get_num_threads(), torch.get_num_threads())
