"""Merges of tiny real networks: what is promised is what the bundle holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import gemel.models.stages as progress_module
from gemel.merger import merge
from gemel.merger.config import MEASUREMENT
from gemel.merger.context import MergeContext
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.measures.evaluation import predict, score
from gemel.models.tasks import task_of
from gemel.models.workload import Workload, load_workload
from gemel.process import ExitCode
from tests.merger.guarantees import ratios_on_val
from tests.merger.options import QUICK
from tests.merger.tiny import data_of, weights_of

FACTORIES = ["tests.merger.tiny:tiny_net"]


def test_merge_by_gemel_saves_bytes_and_reports_its_rounds(workload: Workload, tmp_path: Path) -> None:
    events: list[tuple[str, dict]] = []
    report = merge(
        workload, tmp_path / "b.safetensors", "gemel", options=QUICK,
        progress=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    assert 0 < report.saved_fraction <= report.ceiling_fraction + 0.01
    assert min(ratios_on_val(workload, report.bundle).values()) >= 0.95
    assert report.bytes_after == open_bundle(report.bundle).manifest.bytes.after < report.bytes_before
    rounds = [fields for event, fields in events if event == "round"]
    assert rounds and rounds[-1]["saved_bytes"] > 0 and set(rounds[-1]["ratios"]) <= {"q0", "q1", "q2"}
    assert json.dumps(report.to_json())


def test_merge_announces_its_stages_and_reports_their_progress(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "INTERVAL_S", 0.0)
    events: list[tuple[str, dict]] = []
    merge(
        workload, tmp_path / "b.safetensors", "ceiling", options=replace(QUICK, weights="int8"),
        progress=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    names = events[0][1]["names"]
    assert events[0][0] == "stages" and names[0].startswith("reading") and names[-1].startswith("writing")
    begun = [fields["name"] for event, fields in events if event == "stage"]
    assert [name for name in begun if name in names] == names
    parts: dict[str, list[float]] = {}
    for event, fields in events:
        if event == "stage":
            now = parts.setdefault(fields["name"], [])
        elif event == "part":
            now.append(fields["done"])
    for name in (names[0], names[1], names[-2]):
        assert parts[name] == sorted(parts[name]) and len(parts[name]) >= 3 and parts[name][-1] == 1.0


def test_merge_hides_warnings_of_torch(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MergeContext, "evidence", _warning(MergeContext.evidence))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        merge(workload, tmp_path / "b.safetensors", "none", options=QUICK)
    assert shown == []


def _warning(function: Callable[..., Any]) -> Callable[..., Any]:
    def warn_and_call(*given: Any) -> Any:
        warnings.warn_explicit("lr_scheduler before optimizer", UserWarning, "lr_scheduler.py", 1, "torch.optim")
        warnings.warn("a call of torch will change", FutureWarning, stacklevel=1)
        return function(*given)

    return warn_and_call


def test_merge_report_agrees_with_the_bundle(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=QUICK)
    bundle = open_bundle(report.bundle, FACTORIES)
    for result in report.queries:
        query, test = workload.query(result.id), load_split(workload.query(result.id), "test")
        answers = predict(bundle.build(result.id), query, test)
        assert test.labels is not None
        assert score(task_of(query), answers, test.labels, query.classes, 0.0) == pytest.approx(result.merged)
        evidence = bundle.query(result.id).evidence
        assert evidence is not None and evidence["ratio"] == pytest.approx(result.ratio)


def test_merge_stores_a_shared_tensor_once(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=QUICK)
    assert verify_bundle(report.bundle, FACTORIES) == []
    manifest = open_bundle(report.bundle).manifest
    shared = [entry for entry in manifest.shared if any(path == "last.0.weight" for _, path in entry.members)]
    assert len(shared) == 1 and len({query for query, _ in shared[0].members}) >= 2


@pytest.mark.parametrize("method", ["none", "ceiling", "joint"])
def test_merge_by_a_baseline_saves_all_or_nothing(workload: Workload, tmp_path: Path, method: str) -> None:
    report = merge(workload, tmp_path / "b.safetensors", method, options=QUICK)
    assert (report.saved_fraction >= report.ceiling_fraction) if method == "ceiling" else report.saved_fraction < 0.01
    assert method != "none" or all(query.ratio == 1.0 and query.met for query in report.queries)
    assert method != "joint" or all(query.ratio > 0.9 for query in report.queries)
    trained = [query.id for query in open_bundle(report.bundle).queries if query.trained]
    assert method == "joint" or not trained


def test_merge_interrupted_leaves_no_bundle(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    command = [sys.executable, "-m", "gemel", "merge", str(workload.path), "-o", str(out), "--accept-unproven"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stderr is not None
    process.stderr.readline()  # the merge has begun
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (ExitCode.INTERRUPTED, ExitCode.DONE, ExitCode.SHORT)  # it may have been quicker
    assert out.exists() == (process.returncode != ExitCode.INTERRUPTED)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("damage", ["missing", "not finite", "frame"])
def test_merge_with_bad_files_is_refused(workload: Workload, tmp_path: Path, damage: str) -> None:
    path, message = weights_of(workload, "q2"), r"head\.weight"
    if damage == "missing":
        path.unlink()
        message = "does not exist .query q2.; .*gemel train"
    elif damage == "frame":
        next((data_of(workload, "q1") / "val/left").iterdir()).write_bytes(b"no image")
        message = "not an image that dec"
    else:
        state = load_file(path)
        state["head.weight"][0, 0] = float("nan")
        save_file(state, path)
    with pytest.raises(InputError, match=message):
        merge(load_workload(workload.path), tmp_path / "b.safetensors", options=QUICK)
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny"]


def test_merge_to_an_existing_file_is_refused(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        merge(workload, out, options=QUICK)
    assert out.read_text() == "mine"


def test_merge_reports_a_val_split_of_few_clips(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings_of(name: str) -> list[str]:
        return [note for note in merge(workload, tmp_path / name, "none").notes if "may not generalize" in note]

    (few,) = {len(set(load_split(query, "val").units)) for query in workload.queries}
    warnings = warnings_of("few")
    assert [text.split(":")[0] for text in warnings] == [query.id for query in workload.queries]
    assert f"has only {few} clips or tracks" in warnings[0]
    monkeypatch.setattr("gemel.merger.reference.MEASUREMENT", replace(MEASUREMENT, min_val_units=few))
    assert not warnings_of("enough")


def test_merge_of_unlabelled_frames_uses_the_originals(workload: Workload, tmp_path: Path) -> None:
    for query in workload.queries:
        frames = sorted(data_of(workload, query.id).glob("*/*/*.png"))
        flat = data_of(workload, query.id).with_name(f"{query.id}-flat")
        flat.mkdir()
        for index, frame in enumerate(frames):
            frame.rename(flat / f"clip{index % 6}__{index * 200:06d}.png")
    text = workload.path.read_text()
    for query in workload.queries:
        text = text.replace(f"data/{query.id}", f"data/{query.id}-flat")
    workload.path.write_text(text)
    report = merge(load_workload(workload.path), tmp_path / "b.safetensors", options=QUICK)
    assert report.saved_fraction > 0
    assert all(query.original == 1.0 for query in report.queries)
