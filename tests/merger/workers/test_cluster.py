"""Workers of a cluster: who is lost on the way loses nothing, and a merge with them is the merge without any."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import merger.jobs as jobs_module
import merger.methods.rate as rate_module
from merger import MergeOptions, Resources, merge
from merger.checkpoint import StepCache
from merger.jobs import Job, run_jobs
from merger.workers.cluster import Cluster
from models.bundle import open_bundle
from models.errors import InputError
from models.workload import Workload
from tests.merger.options import QUICK
from tests.merger.workers import hard_times
from tests.merger.workers.hard_times import Bench, Desk, Ray

OPTIONS = MergeOptions(replace(QUICK.recipe, epochs=1, frames_per_epoch=32), precision="fp32")


@pytest.fixture(autouse=True)
def everything_is_worth_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "WORTH_SENDING", 0.0)


def _found(ray: Ray, jobs: list[Job]) -> tuple[list[dict[str, Any]], float, list[tuple[str, dict[str, Any]]]]:
    """Results and work of jobs that two machines do, and what progress hears."""
    told: list[tuple[str, dict[str, Any]]] = []
    ctx = Bench(progress=lambda event, **fields: told.append((event, fields)))
    ctx.workers = cluster = Cluster(ray, Desk, {"CPU": 1}, ctx.progress)
    try:
        return run_jobs(ctx, StepCache(), "jobs", jobs), ctx.flops.total, told
    finally:
        cluster.close()
        assert ray.alive == []


def _squares(*numbers: int) -> list[Job]:
    return [Job(f"square of {number}", hard_times.squared, {"number": number}) for number in numbers]


def test_results_come_in_order_from_as_many_actors_as_there_is_room_for() -> None:
    found, flops, told = _found(Ray(1, 1), _squares(5, 1, 4, 2))
    assert [one["square"] for one in found] == [25, 1, 16, 4] and flops == 12
    assert len({one["where"] for one in found}) == 2 and "main" not in {one["where"] for one in found}
    assert sorted(fields["number"] for event, fields in told if event == "squared") == [1, 2, 4, 5]


@pytest.mark.parametrize(("deaths", "then"), [(1, ["another worker"]), (2, ["another worker", "the main process"])])
def test_the_job_of_an_actor_that_is_lost_is_done_by_another_and_then_here(deaths: int, then: list[str]) -> None:
    given = {"number": 2, "deaths": [], "most": deaths}
    found, flops, told = _found(Ray(2), [*_squares(1), Job("dying", hard_times.dying, given), *_squares(3)])
    assert [one["square"] for one in found] == [1, 4, 9] and flops == 6
    assert (found[1]["where"] == "main") == (deaths == 2)
    warnings = [fields["text"] for event, fields in told if event == "warning"]
    assert [text.partition(" at 'dying': ")[2] for text in warnings] == [f"{who} does it" for who in then]
    assert all("is gone" in text for text in warnings)


def test_a_job_that_fails_in_an_actor_is_done_here_and_bad_input_is_refused() -> None:
    found, _, told = _found(Ray(2), [Job("failing", hard_times.failing, {"number": 2}), *_squares(3)])
    assert [one["square"] for one in found] == [4, 9] and found[0]["where"] == "main"
    assert "failed (MemoryError: no room)" in next(fields["text"] for event, fields in told if event == "warning")
    with pytest.raises(InputError, match=r"frame.png: number 7: does not decode; replace it") as refused:
        _found(Ray(2), [*_squares(1), Job("bad", hard_times.refusing, {"number": 7})])
    assert refused.value.key == "number 7"


def test_actors_that_fit_on_no_machine_are_refused() -> None:
    assert Cluster(Ray(5, 3, 1), Desk, {"CPU": 2}, Bench().progress).most == 3
    with pytest.raises(InputError, match=r"--ray: no machine of the cluster has 2 CPU; lower --threads"):
        Cluster(Ray(1, 1), Desk, {"CPU": 2}, Bench().progress)


@pytest.mark.exhaustive
def test_a_killed_worker_of_a_cluster_changes_nothing(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'gemel[ray]'")
    alone = replace(OPTIONS, resources=Resources(threads=1))
    straight = merge(workload, tmp_path / "a.safetensors", "joint", options=alone)
    monkeypatch.setattr(rate_module, "trial", hard_times.trial_killed_once)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))  # the tests' own model
    told, rates, workers = [], [], []

    def progress(event: str, **fields: Any) -> None:
        told.extend([fields["text"]] if event == "warning" and "worker" in fields["text"] else [])
        rates.extend([fields["rate"]] if event == "rate" else [])
        workers.extend([fields["workers"]] if event == "workers" else [])

    options = replace(OPTIONS, resources=Resources(threads=1, ray="local"))
    merged = merge(workload, tmp_path / "b.safetensors", "joint", options=options, progress=progress)
    assert len(told) == 1 and "is gone" in told[0] and "another worker does it" in told[0]
    assert sorted(rates) == sorted(rate_module.RATES) and workers[0] >= 1
    assert merged.flops == straight.flops
    assert open_bundle(merged.bundle).manifest.to_json() == open_bundle(straight.bundle).manifest.to_json()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not ray.is_initialized() and _children() == []


def _children() -> list[str]:
    """The names of processes of this one that have anything to do with Ray."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if fields.get("PPid") == str(os.getpid()) and not fields["State"].startswith("Z"):
            found.append(fields["Name"])
    return [name for name in found if "ray" in name or "gcs" in name]


def test_without_a_cluster_there_is_one_line(workload: Workload, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'gemel[ray]'")
    options = replace(OPTIONS, resources=Resources(ray="127.0.0.1:9"))
    with pytest.raises(InputError, match=r"--ray: no cluster at '127.0.0.1:9': .*; give local, auto") as refused:
        merge(workload, tmp_path / "b.safetensors", "joint", options=options)
    assert "\n" not in str(refused.value)


def test_without_ray_the_extra_is_named(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    options = replace(OPTIONS, resources=Resources(ray="local"))
    with pytest.raises(InputError, match=r"--ray: Ray is not installed; pip install 'gemel\[ray\]'"):
        merge(workload, tmp_path / "b.safetensors", "joint", options=options)
