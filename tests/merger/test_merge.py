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
import yaml

import merger.events as progress_module
from gemel.process import ExitCode
from merger import merge
from merger.config import MEASUREMENT
from merger.context import MergeContext
from merger.merge import ceiling_fraction
from models.bundle import open_bundle, verify_bundle
from models.data import load_split
from models.errors import InputError
from models.evaluation import predict, score
from models.tasks import task_of
from models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.surely import ratios_on_val
from tests.merger.tiny import data_of, weights_of, write_random_weights, write_workload

FACTORIES = ["tests.merger.tiny:tiny_net"]


def test_the_papers_search_saves_bytes_and_every_query_keeps_its_target(workload: Workload, tmp_path: Path) -> None:
    events: list[tuple[str, dict]] = []
    report = merge(
        workload, tmp_path / "b.safetensors", "gemel", options=QUICK,
        progress=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    assert 0 < report.saved_fraction <= ceiling_fraction(workload) + 0.01
    assert min(ratios_on_val(workload, report.bundle).values()) >= 0.95
    assert report.bytes_after == open_bundle(report.bundle).manifest.bytes.after < report.bytes_before
    rounds = [fields for event, fields in events if event == "round"]
    assert rounds and rounds[-1]["saved_bytes"] > 0 and set(rounds[-1]["ratios"]) <= {"q0", "q1", "q2"}
    assert json.dumps(report.to_json())


def test_a_merge_says_its_stages_beforehand_and_then_how_much_of_each_is_done(
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


def test_what_torch_warns_of_is_no_line_of_a_merge(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_the_report_says_is_what_the_bundle_answers(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=QUICK)
    bundle = open_bundle(report.bundle, FACTORIES)
    for result in report.queries:
        query, test = workload.query(result.id), load_split(workload.query(result.id), "test")
        answers = predict(bundle.build(result.id), query, test)
        assert test.labels is not None
        assert score(task_of(query.task), answers, test.labels, query.classes, 0.0) == pytest.approx(result.merged)
        evidence = bundle.query(result.id).evidence
        assert evidence is not None and evidence["ratio"] == pytest.approx(result.ratio)


def test_shared_tensors_stand_once_and_are_used_by_all_their_members(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", options=QUICK)
    assert verify_bundle(report.bundle, FACTORIES) == []
    manifest = open_bundle(report.bundle).manifest
    shared = [entry for entry in manifest.shared if any(path == "last.0.weight" for _, path in entry.members)]
    assert len(shared) == 1 and len({query for query, _ in shared[0].members}) >= 2


def test_none_changes_nothing(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "none", options=QUICK)
    assert report.flops == 0 or report.flops < 1e9
    assert all(query.ratio == 1.0 and query.met for query in report.queries)
    assert report.saved_fraction < 0.01


def test_ceiling_saves_the_whole_ceiling(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "ceiling", options=QUICK)
    assert report.saved_fraction >= report.ceiling_fraction


def test_joint_shares_nothing_and_does_not_get_worse_on_val(workload: Workload, tmp_path: Path) -> None:
    report = merge(workload, tmp_path / "b.safetensors", "joint", options=QUICK)
    assert report.saved_fraction < 0.01
    assert all(query.ratio > 0.9 for query in report.queries)


def test_an_interrupted_merge_resumes_to_the_same_bundle(workload: Workload, tmp_path: Path) -> None:
    straight = merge(workload, tmp_path / "straight.safetensors", "gemel", options=QUICK)

    def interrupt_after_first_round(event: str, **fields) -> None:
        if event == "round":
            raise KeyboardInterrupt

    out = tmp_path / "resumed.safetensors"
    with pytest.raises(KeyboardInterrupt):
        merge(workload, out, "gemel", options=QUICK, progress=interrupt_after_first_round)
    assert not out.exists() and (tmp_path / "resumed.safetensors.work").is_dir()
    with pytest.raises(InputError, match="interrupted merge; give --resume"):
        merge(workload, out, "gemel", options=QUICK)
    rounds = []
    resumed = merge(
        workload, out, "gemel", resume=True, options=QUICK,
        progress=lambda event, **fields: rounds.append(fields["round"]) if event == "round" else None,
    )  # fmt: skip
    assert rounds[0] == 2
    assert open_bundle(resumed.bundle).manifest.shared == open_bundle(straight.bundle).manifest.shared
    assert not (tmp_path / "resumed.safetensors.work").exists()


def test_a_resume_with_other_options_is_refused(workload: Workload, tmp_path: Path) -> None:
    def interrupt(event: str, **fields) -> None:
        if event == "round":
            raise KeyboardInterrupt

    out = tmp_path / "b.safetensors"
    with pytest.raises(KeyboardInterrupt):
        merge(workload, out, "gemel", options=QUICK, progress=interrupt)
    with pytest.raises(InputError, match="belongs to another merge \\(seed differ"):
        merge(workload, out, "gemel", resume=True, seed=1, options=QUICK)


def test_ctrl_c_leaves_no_bundle_and_a_folder_to_go_on_from(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    command = [sys.executable, "-m", "gemel", "merge", str(workload.path), "-o", str(out), "--json"]
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: weights_of(w, "q0").unlink(), "q0.safetensors: .*does not exist .query q0.; .*gemel train"),
        (lambda w: (data_of(w, "q1") / "test" / "left").rename(data_of(w, "q1") / "l"), "class 'left'"),
        (lambda w: _add_class(w, "q2", "middle"), "q2.safetensors: .*only the head does not fit the class list"),
        (lambda w: next((data_of(w, "q1") / "val/left").iterdir()).write_bytes(b"no image"), "not an image that dec"),
    ],
    ids=["weights missing", "class missing", "class list differs", "image damaged"],
)
def test_bad_input_is_named_and_nothing_is_written(workload: Workload, tmp_path: Path, damage, message) -> None:
    damage(workload)
    out = tmp_path / "b.safetensors"
    with pytest.raises(InputError, match=message):
        merge(load_workload(workload.path), out, options=QUICK)
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny"]


def _add_class(workload: Workload, query: str, name: str) -> None:
    document = yaml.safe_load(workload.path.read_text())
    next(one for one in document["queries"] if one["id"] == query)["classes"].append(name)
    workload.path.write_text(yaml.safe_dump(document))


def test_nan_weights_are_refused(workload: Workload, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = weights_of(workload, "q2")
    state = load_file(path)
    state["head.weight"][0, 0] = float("nan")
    save_file(state, path)
    with pytest.raises(InputError, match=r"head\.weight"):
        merge(workload, tmp_path / "b.safetensors", options=QUICK)


def test_an_existing_output_is_refused_before_any_work(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "b.safetensors"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        merge(workload, out, options=QUICK)
    assert out.read_text() == "mine"


def test_an_original_at_chance_is_called_no_evidence(tmp_path: Path) -> None:
    path = write_workload(tmp_path / "w", queries=2, frames=40)
    write_random_weights(path)
    warnings = []
    report = merge(
        load_workload(path), tmp_path / "b.safetensors", "none",
        progress=lambda event, **fields: warnings.append(fields["text"]) if event == "warning" else None,
    )  # fmt: skip
    assert not report.queries[0].worth
    assert any("no evidence" in text for text in warnings)


def test_a_val_split_of_few_clips_is_reported(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings_of(name: str) -> list[str]:
        said: list[str] = []
        merge(
            workload, tmp_path / name, "none",
            progress=lambda event, **fields: said.append(fields["text"]) if event == "warning" else None,
        )  # fmt: skip
        return [text for text in said if "may not generalize" in text]

    (few,) = {len(set(load_split(query, "val").units)) for query in workload.queries}
    warnings = warnings_of("few")
    assert [text.split(":")[0] for text in warnings] == [query.id for query in workload.queries]
    assert f"has only {few} clips or tracks" in warnings[0]
    monkeypatch.setattr("merger.context.MEASUREMENT", replace(MEASUREMENT, min_val_units=few))
    assert not warnings_of("enough")


def test_unlabelled_frames_are_enough(workload: Workload, tmp_path: Path) -> None:
    """Without labels the originals are teacher and reference."""
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
