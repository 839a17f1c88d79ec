"""Several processes: the same result as one process, errors on all ranks, and what torchrun's variables say."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemel.merger import merge
from gemel.merger.context import MergeContext
from gemel.merger.distributed import (
    PeerExit,
    ProcessGroup,
    Resources,
    check_consistent,
    process_group,
    run_on_ray,
)
from gemel.merger.methods.top_down import whole_plan
from gemel.merger.training.recipe import Recipe
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.errors import GemelError, InputError
from gemel.models.workload import Workload, load_workload
from tests.merger.kills import Killed, kill_after, store_at_every_chance
from tests.merger.options import QUICK
from tests.merger.two_ranks import run

RECIPE = Recipe(rate=2e-3, epochs=2, batch=64, micro_batch=16, frames_per_epoch=16, features=1.0)


def train_jointly(group: ProcessGroup, path: Path, stored: dict[str, Any] | None = None) -> dict[str, Any]:
    """A joint training of three models under the whole plan, or the rest of it."""
    ctx = MergeContext(load_workload(path), group=group)
    ctx.assign_queries()
    plan = whole_plan(ctx, QUICK)
    models = ctx.spread_models(plan, ctx.queries)
    lacking = [query for query, model in models.items() if any(p.is_meta for p in model.parameters())]
    training, losses, states = ctx.training(models, RECIPE), list[float](), list[dict[str, Any]]()
    if stored is not None:
        training.load_state_dict(stored)
    while training.epochs < RECIPE.epochs:
        losses.append(training.epoch())
        states.append(deepcopy(training.state_dict()))
    return {
        "losses": losses, "states": ctx.snapshots(models), "own": group.own(ctx.queries), "lacking": lacking,
        "flops": ctx.flops.total, "stored": states[0],
        "moments": {name: own["exp_avg"] for name, own in states[-1]["moments"].items()},
    }  # fmt: skip


def flatten(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested dicts by their path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    return {path: tensor for key, own in value.items() for path, tensor in flatten(own, f"{name}/{key}").items()}


def merge_workload(group: ProcessGroup, path: Path, out: Path, method: str) -> dict[str, Any]:
    """A whole merge."""
    options = replace(QUICK, weights="int8", resources=Resources(1, None, group))
    return merge(load_workload(path), out, method, options=options).to_json()


def merge_until_killed(group: ProcessGroup, path: Path, out: Path, writes: int) -> str:
    """The same merge, which stores its state at every chance and ends in all ranks after so many times."""
    with pytest.MonkeyPatch.context() as patch:
        store_at_every_chance(patch)
        kill_after(patch, writes)
        try:
            return str(merge_workload(group, path, out, "top-down"))
        except Killed:
            return "killed"


def resume_merge(group: ProcessGroup, path: Path, out: Path) -> None:
    """The rest of it."""
    options = replace(QUICK, weights="int8", resources=Resources(1, None, group))
    merge(load_workload(path), out, resume=True, options=options)


def call_collectives(group: ProcessGroup) -> dict[str, Any]:
    """Every collective once."""
    group.assign([["a"], ["b", "c"]])
    other = 1 - group.rank
    received = {other: torch.zeros(2 + other)}
    group.exchange({other: torch.full((2 + group.rank,), float(group.rank))}, received)
    with group.local():
        alone = group.size, group.own("abc")
    return {
        "broadcast": group.broadcast({"rank": group.rank}),
        "gathered": group.all_gather_object(lambda: (group.rank, group.size)),
        "scalars": group.all_reduce_scalars([1.0, group.rank]),
        "exchanged": (received[other].tolist(), group.sent_bytes),
        "on rank 0": group.gather_on_rank0(group.rank),
        "own": group.own("abc"), "alone": alone, "clock": group.clock(),
    }  # fmt: skip


def fail_on_rank0(group: ProcessGroup) -> str:
    """The error of rank 0 as each rank sees it."""

    def fail() -> None:
        raise GemelError("the disk is full")

    try:
        group.run_on_rank0(fail)
    except GemelError as error:
        return str(error)
    except PeerExit as error:
        return f"exit {error.code}"
    return "nothing"


def run_checks(group: ProcessGroup) -> tuple[dict[str, Any], str, str]:
    """The collectives, and the errors of rank 0 and of other files on rank 1, in one start of the processes."""
    collectives, error, other = call_collectives(group), fail_on_rank0(group), "nothing"
    try:
        check_consistent(group, {"workload": group.rank, "seed": 0})
    except (GemelError, PeerExit) as refusal:
        other = str(refusal)
    return collectives, error, other


def test_group_of_two_runs_all_collectives_and_ends_together() -> None:
    (first, *errors), (second, *others) = run(run_checks)
    assert first["broadcast"] == second["broadcast"] == {"rank": 0}
    assert first["gathered"] == second["gathered"] == [(0, 1), (1, 1)]
    assert first["scalars"] == second["scalars"] == [2.0, 1.0]
    assert first["exchanged"] == ([1.0, 1.0, 1.0], 8) and second["exchanged"] == ([0.0, 0.0], 12)
    assert (first["on rank 0"], second["on rank 0"]) == ([0, 1], [1])
    assert (first["own"], second["own"]) == (["a"], ["b", "c"])
    assert first["alone"] == second["alone"] == (1, ["a", "b", "c"])
    assert first["clock"] == second["clock"]
    exit_code = str(GemelError.exit_code)
    assert errors[0] == "the disk is full" and others == [f"exit {exit_code}", exit_code]
    assert "process 1 has another workload than the first" in errors[1]


@pytest.mark.parametrize("size", [2, 3])
def test_training_in_several_processes_equals_one_process(workload: Workload, size: int) -> None:
    (alone,), ranks = run(train_jointly, workload.path, size=1), run(train_jointly, workload.path, size=size)
    assert sorted(query for one in ranks for query in one["own"]) == ["q0", "q1", "q2"]
    for one in ranks:
        assert one["losses"] == alone["losses"] and one["flops"] == alone["flops"]
        assert sorted(one["own"] + one["lacking"]) == ["q0", "q1", "q2"]
        for kind in ("states", "moments"):
            found, expected = flatten(one[kind]), flatten(alone[kind])
            assert found.keys() == expected.keys() or (kind == "moments" and one is not ranks[0])
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), kind


@pytest.mark.parametrize("method", ["top-down", pytest.param("gemel", marks=pytest.mark.exhaustive)])
def test_merge_in_two_processes_gives_the_same_bundle(workload: Workload, tmp_path: Path, method: str) -> None:
    alone = merge_workload(ProcessGroup(), workload.path, tmp_path / "alone.safetensors", method)
    first, second = run(merge_workload, workload.path, tmp_path / "both.safetensors", method)
    assert verify_bundle(tmp_path / "both.safetensors") == []
    assert first["bytes_after"] == second["bytes_after"] == alone["bytes_after"]
    assert [one["met"] for one in first["queries"]] == [one["met"] for one in alone["queries"]]
    assert open_bundle(tmp_path / "alone.safetensors").digest == open_bundle(tmp_path / "both.safetensors").digest
    assert list(tmp_path.glob("*.work")) == []


def test_training_of_two_processes_goes_on_in_one_or_three(workload: Workload) -> None:
    both = run(train_jointly, workload.path)
    for size in (1, 3):
        for one in run(train_jointly, workload.path, both[0]["stored"], size=size):
            assert one["losses"] == both[0]["losses"][1:]
            found, expected = flatten(one["states"]), flatten(both[0]["states"])
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_merge_killed_in_two_processes_is_resumed_with_three(workload: Workload, tmp_path: Path) -> None:
    merge_workload(ProcessGroup(), workload.path, tmp_path / "alone.safetensors", "top-down")
    out = tmp_path / "both.safetensors"
    assert run(merge_until_killed, workload.path, out, 5) == ["killed", "killed"]
    run(resume_merge, workload.path, out, size=3)
    assert open_bundle(out).digest == open_bundle(tmp_path / "alone.safetensors").digest


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "2 of 2 processes makes no sense"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "x of 2 processes makes no sense"),
        ({"RANK": "0", "WORLD_SIZE": "99999"}, "makes no sense"),
    ],
)
def test_process_group_with_bad_variables_is_refused(variables: dict[str, str], message: str) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}
    with pytest.raises(InputError, match=message), process_group(environment):
        pass


def test_process_group_without_torchrun_is_one_process() -> None:
    with process_group({}) as group:
        assert (group.rank, group.size) == (0, 1) and group.own(["a"]) == ["a"] and group.all_reduce_scalars([2]) == [2]


def test_run_on_ray_without_a_cluster_is_one_line() -> None:
    pytest.importorskip("ray.train.torch")
    with pytest.raises(InputError, match=r"--ray: no cluster at '127\.0\.0\.1:1'"):
        run_on_ray("127.0.0.1:1", lambda group, progress: None, lambda event, **fields: None)


def return_rank(group: ProcessGroup, progress: Any) -> tuple[int, int]:
    """An entry for Ray."""
    progress("round", text="from rank 0")
    return group.rank, group.size


@pytest.mark.exhaustive
def test_run_on_ray_returns_the_result_of_rank0() -> None:
    pytest.importorskip("ray.train.torch")
    events: list[str] = []
    assert run_on_ray("local", return_rank, lambda event, **fields: events.append(event)) == (0, 1)
    assert events == ["round"]
