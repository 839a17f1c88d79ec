"""Several processes: the same result as one process, errors on all ranks, and what torchrun's variables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemel.merger import merge
from gemel.merger.checkpoint import snapshots
from gemel.merger.context import MergeContext
from gemel.merger.distributed import (
    PeerExit,
    ProcessGroup,
    Resources,
    check_consistent,
    partition,
    process_group,
    run_on_ray,
)
from gemel.merger.methods.top_down import whole_plan
from gemel.merger.training.recipe import Recipe
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.errors import GemelError, InputError
from gemel.models.sharing.plan import tie
from gemel.models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.two_ranks import run

RECIPE = Recipe(rate=2e-3, epochs=2, batch=8, micro_batch=4, frames_per_epoch=16, features=1.0)


def train_jointly(group: ProcessGroup, path: Path) -> dict[str, Any]:
    """A joint training of three models under the whole plan."""
    ctx = MergeContext(load_workload(path), group=group)
    group.assign(partition({query: float(ctx.flops.of(ctx.queries[query])) for query in ctx.queries}, group.size))
    plan, models = whole_plan(ctx, QUICK), ctx.models(ctx.queries)
    tie(models, plan)
    training = ctx.training(models, RECIPE)
    losses = [training.epoch() for _ in range(RECIPE.epochs)]
    moments = training.state_dict()["moments"]
    return {
        "losses": losses, "states": snapshots(models), "own": group.own(ctx.queries), "flops": ctx.flops.total,
        "moments": {name: own["exp_avg"].clone() for name, own in moments.items() if own},
    }  # fmt: skip


def merge_workload(group: ProcessGroup, path: Path, out: Path, method: str) -> dict[str, Any]:
    """A whole merge."""
    options = replace(QUICK, weights="int8", resources=Resources(1, None, group))
    return merge(load_workload(path), out, method, options=options).to_json()


def call_collectives(group: ProcessGroup) -> dict[str, Any]:
    """Every collective once."""
    group.assign([["a"], ["b", "c"]])
    tensor = torch.full((3,), float(group.rank + 1))
    buffers = {query: [torch.full((2,), float(group.rank))] for query in "abc"}
    group.sync_from_owners(buffers)
    with group.local():
        alone = group.size, group.own("abc")
    return {
        "broadcast": group.broadcast({"rank": group.rank}, 1),
        "gathered": group.all_gather_object(lambda: (group.rank, group.size)),
        "scalars": group.all_reduce_scalars([1.0, group.rank]),
        "sum": group.all_reduce(tensor).tolist(),
        "buffers": {query: own[0].tolist() for query, own in buffers.items()},
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
    assert first["broadcast"] == second["broadcast"] == {"rank": 1}
    assert first["gathered"] == second["gathered"] == [(0, 1), (1, 1)]
    assert first["scalars"] == second["scalars"] == [2.0, 1.0]
    assert first["sum"] == second["sum"] == [3.0, 3.0, 3.0]
    assert first["buffers"] == second["buffers"] == {"a": [0.0, 0.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}
    assert (first["own"], second["own"]) == (["a"], ["b", "c"])
    assert first["alone"] == second["alone"] == (1, ["a", "b", "c"])
    assert first["clock"] == second["clock"]
    exit_code = str(GemelError.exit_code)
    assert errors[0] == "the disk is full" and others == [f"exit {exit_code}", exit_code]
    assert "process 1 has another workload than the first" in errors[1]


def test_training_in_two_processes_equals_one_process(workload: Workload) -> None:
    alone = train_jointly(ProcessGroup(), workload.path)
    both = run(train_jointly, workload.path)
    assert sorted(both[0]["own"] + both[1]["own"]) == ["q0", "q1", "q2"] and both[0]["own"] and both[1]["own"]
    for one in both:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert one["flops"] == alone["flops"] and one["moments"].keys() == alone["moments"].keys()
        for query, state in alone["states"].items():
            for name, tensor in state.items():
                torch.testing.assert_close(one["states"][query][name], tensor, rtol=1e-3, atol=2e-4)
    for query, state in both[0]["states"].items():
        assert all(torch.equal(both[1]["states"][query][name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("method", ["top-down", pytest.param("gemel", marks=pytest.mark.exhaustive)])
def test_merge_in_two_processes_gives_the_same_sharing(workload: Workload, tmp_path: Path, method: str) -> None:
    alone = merge_workload(ProcessGroup(), workload.path, tmp_path / "alone.safetensors", method)
    first, second = run(merge_workload, workload.path, tmp_path / "both.safetensors", method)
    assert verify_bundle(tmp_path / "both.safetensors") == []
    assert first["bytes_after"] == second["bytes_after"] == alone["bytes_after"]
    assert [one["met"] for one in first["queries"]] == [one["met"] for one in alone["queries"]]
    tensors = [
        {query.id: sorted(query.tensors) for query in open_bundle(tmp_path / f"{name}.safetensors").queries}
        for name in ("alone", "both")
    ]
    assert tensors[0] == tensors[1]
    assert list(tmp_path.glob("*.work")) == []


@given(st.dictionaries(st.text("abcdef", min_size=1), st.floats(1, 100), min_size=1), st.integers(1, 5))
def test_partition_covers_all_queries_evenly(flops: dict[str, float], size: int) -> None:
    parts = partition(flops, size)
    loads = [sum(flops[query] for query in part) for part in parts]
    assert len(parts) == size and sorted(query for part in parts for query in part) == sorted(flops)
    assert max(loads) - min(loads) <= max(flops.values()) + 1e-6


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
