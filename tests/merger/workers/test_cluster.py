"""A merge on a Ray cluster of two workers, one of which is killed on the way, is the merge without any."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import merger.methods.rate as rate_module
import merger.workers.jobs as workers_module
from merger import MergeOptions, Resources, merge
from models.bundle import open_bundle
from models.errors import InputError
from models.workload import Workload
from tests.merger.options import QUICK
from tests.merger.workers import hard_times

pytestmark = pytest.mark.slow
OPTIONS = MergeOptions(replace(QUICK.recipe, epochs=1, frames_per_epoch=32), precision="fp32")


def test_a_killed_worker_of_a_cluster_changes_nothing(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'gemel[ray]'")
    straight = merge(workload, tmp_path / "a.safetensors", "joint", options=OPTIONS, resources=Resources(1, 1))
    monkeypatch.setattr(workers_module, "WORTH_SENDING", 0.0)
    monkeypatch.setattr(rate_module, "trial", hard_times.trial_killed_once)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))  # the tests' own model
    told, rates = [], []

    def progress(event: str, **fields) -> None:
        told.extend([fields["text"]] if event == "warning" and "worker" in fields["text"] else [])
        rates.extend([fields["rate"]] if event == "rate" else [])

    resources = Resources(workers=2, threads=1, ray="local")
    merged = merge(workload, tmp_path / "b.safetensors", "joint", options=OPTIONS, progress=progress,
                   resources=resources)  # fmt: skip
    assert len(told) == 1 and "is gone" in told[0] and "another worker does it" in told[0]
    assert sorted(rates) == sorted(rate_module.RATES)
    assert merged.work == straight.work
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
    with pytest.raises(InputError, match=r"--ray: no cluster at '127.0.0.1:9': .*; give local, auto") as refused:
        merge(workload, tmp_path / "b.safetensors", "joint", resources=Resources(ray="127.0.0.1:9"))
    assert "\n" not in str(refused.value)


def test_without_ray_the_extra_is_named(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"--ray: Ray is not installed; pip install 'gemel\[ray\]'"):
        merge(workload, tmp_path / "b.safetensors", "joint", resources=Resources(ray="auto"))
