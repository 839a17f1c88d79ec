"""`gemel drift check`: queries below target are found and reverted; bad spools are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from gemel import check_drift
from gemel.cli import main
from gemel.drift_state import FILE, DriftState
from gemel.edge_runtime.frames.samples import DRIFT_FILE, read_drift, read_head
from gemel.models.bundle import open_bundle, verify_bundle, write_substituted
from gemel.models.bundle.delta import apply_update, write_update
from gemel.models.errors import InputError
from gemel.models.measures.agreement import BELOW, KEPT, MIN_COMPARED, ONE_ANSWER, TOO_FEW, UNSURE
from gemel.models.notes import collect_notes
from gemel.models.workload import load_workload
from tests.edge_runtime.tiny import change_head
from tests.fake_gpu import fake_gpu
from tests.gemel.spools import answer, originals, write_merged, write_workload

ENOUGH = 80
"""Samples: enough to tell a query that always answers otherwise, at one false alarm in a year of the box."""


@pytest.fixture(scope="module")
def spools(tmp_path_factory):
    """A workload; a bundle that answers as its originals, one in which `b` fell, and a spool of each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("drift")
    load = write_workload(folder)
    for name, broken in (("good", ()), ("fallen", ("b",))):
        bundle = write_merged(folder / f"{name}.safetensors", load, *broken)
        answer(folder / name, bundle, range(ENOUGH))
        (folder / name / "ledger.json").write_text(json.dumps({"bundle": str(bundle.path), "digest": bundle.digest}))
    return folder


@pytest.fixture
def folder(spools, tmp_path):
    """A copy of it, for a test to change."""
    shutil.copytree(spools, tmp_path / "d")
    for name in ("good", "fallen"):
        ledger = {"bundle": str(tmp_path / "d" / f"{name}.safetensors")}
        (tmp_path / "d" / name / "ledger.json").write_text(json.dumps(ledger))
    return tmp_path / "d"


def check_box(*words, **options):
    """The check as JSON."""
    return check_drift(*words, **options).to_json()


def rows(found):
    return {row["id"]: row for row in found["queries"]}


def test_check_unchanged_box_agrees_in_every_frame(folder):
    found = check_box(folder / "good", folder / "workload.yaml", folder / "new.safetensors")
    for row in found["queries"]:
        assert (row["frames"], row["ratio"], row["verdict"]) == (ENOUGH, 1.0, KEPT), row
    assert found["left_out"] == {} and found["out"] is None and not (folder / "new.safetensors").exists()


def test_samples_hold_different_predictions(folder):
    """Else the tests here would prove little."""
    heads = [read_head(path) for path in (folder / "good" / "samples").iterdir()]
    assert {head.label for head in heads if head.query == "a"} == {"empty", "busy"}
    assert sum(bool(head.detections) for head in heads if head.query == "d") > MIN_COMPARED


def test_check_out_reverts_only_the_query_below_target(folder, capsys):
    out, old = folder / "new.safetensors", folder / "fallen.safetensors"
    code = main(["drift", "check", str(folder / "fallen"), str(folder / "workload.yaml"), "-o", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1 and found["out"] == str(out) and found["reported"]
    assert {name: (row["verdict"], row["reverted"]) for name, row in rows(found).items()} == {
        "a": (KEPT, False), "b": (BELOW, True), "d": (KEPT, False),
    }  # fmt: skip
    chances = {name: row["chance_per_year"] for name, row in rows(found).items()}
    assert chances["b"] <= 1 < 100 < min(chances["a"], chances["d"]), "one bound for all that the check is sure of"
    assert {"id", "frames", "ratio", "reverted"} <= found["queries"][0].keys()
    assert verify_bundle(out) == []
    before, after = open_bundle(old), open_bundle(out)
    for name in ("a", "d"):
        assert after.query(name) == before.query(name) and after.query(name).tensors == before.query(name).tensors
    own = originals(load_workload(folder / "workload.yaml"))["b"].state_dict()
    assert all(torch.equal(after.tensor(name), own[key]) for key, name in after.query("b").tensors.items())
    made = write_update(old, out, folder / "update")
    assert 0 < made.tensors < made.of_tensors
    apply_update(old, folder / "update", folder / "again.safetensors")
    assert (folder / "again.safetensors").read_bytes() == out.read_bytes()
    answer(folder / "later", after, range(ENOUGH))
    assert all(row["ratio"] == 1.0 for row in check_box(folder / "later", folder / "workload.yaml")["queries"])


def test_check_leaves_the_report_in_the_spool(folder):
    found = check_box(folder / "fallen", folder / "workload.yaml")
    report = read_drift(folder / "fallen")
    assert [(one.id, one.ratio, one.verdict) for one in report.queries] == [
        (row["id"], row["ratio"], row["verdict"]) for row in found["queries"]
    ]
    assert report.checked_at == found["checked_at"] and report.bundle == found["bundle"]
    assert not any(one.reverted for one in report.queries)  # nothing was written


def test_check_without_out_names_the_option(folder, capsys):
    assert main(["drift", "check", str(folder / "fallen"), str(folder / "workload.yaml")]) == 1
    printed = capsys.readouterr().out
    assert "BELOW its target" in printed and "-o FILE writes" in printed
    assert "95 %" not in printed and "by chance" in printed and "a year" in printed
    assert main(["drift", "check", str(folder / "good"), str(folder / "workload.yaml")]) == 0


def test_check_too_few_frames_have_no_verdict(folder, capsys):
    for path in sorted((folder / "fallen" / "samples").glob("*-b-*"))[: ENOUGH - 5]:
        path.unlink()
    found = rows(check_box(folder / "fallen", folder / "workload.yaml", folder / "new.safetensors"))
    assert (found["b"]["frames"], found["b"]["ratio"], found["b"]["verdict"]) == (5, None, TOO_FEW)
    assert main(["drift", "check", str(folder / "fallen"), str(folder / "workload.yaml")]) == 0
    assert "too few" in capsys.readouterr().out


def test_check_samples_of_another_bundle_are_left_out(folder):
    shutil.copytree(folder / "good" / "samples", folder / "both" / "samples")
    answer(folder / "both", open_bundle(folder / "fallen.safetensors"), range(100, 100 + ENOUGH))
    with collect_notes() as notes:
        newest = check_box(folder / "both", folder / "workload.yaml")
    (note,) = notes
    assert note.startswith(
        f"{folder / 'both'}: {3 * ENOUGH} samples of another bundle are left out; a check covers one"
    )
    assert rows(newest)["b"]["verdict"] == BELOW and newest["left_out"] == {"of another bundle": 3 * ENOUGH}
    named = check_box(folder / "both", folder / "workload.yaml", bundle=folder / "good.safetensors")
    assert rows(named)["b"]["verdict"] == KEPT and named["bundle"] != newest["bundle"]


def test_check_query_with_own_weights_is_not_reverted(folder):
    """It answered otherwise for another reason, such as an engine."""
    samples = folder / "good" / "samples"
    for path in samples.glob("*-b-*"):
        data = path.read_bytes()
        label = read_head(path).label
        other = {"empty": "busy", "busy": "empty"}[label or ""]
        path.write_bytes(change_head(data, f'"label":"{label}"', f'"label":"{other}"'))
    found = check_box(folder / "good", folder / "workload.yaml", folder / "new.safetensors")
    assert rows(found)["b"]["verdict"] == BELOW and not rows(found)["b"]["reverted"]
    assert "already has its own weights" in rows(found)["b"]["note"] and not (folder / "new.safetensors").exists()


def write_pipe(path: Path, _: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda path, _: path.write_bytes(path.read_bytes()[:-30]), "unusable"),
    (lambda path, _: path.write_bytes(b"\0" * 100), "unreadable"),
    (lambda path, _: path.write_bytes(path.read_bytes().replace(b'"query":"a"', b'"query":"z"')), "unreadable"),
    (write_pipe, "unreadable"),
    (lambda path, other: path.write_bytes(change_head(other, '"query":"d"', '"query":"a"')), "unusable"),
], ids=["cut picture", "no head", "wrong checksum", "pipe", "another task"])  # fmt: skip
def test_check_damaged_sample_is_left_out(folder, damage, reason):
    first, other = (sorted((folder / "good" / "samples").glob(f"*-{query}-*"))[0] for query in "ad")
    damage(first, other.read_bytes())
    found = check_box(folder / "good", folder / "workload.yaml")
    assert found["left_out"] == {reason: 1} and rows(found)["a"]["frames"] == ENOUGH - 1
    assert rows(found)["a"]["verdict"] == KEPT


@pytest.mark.parametrize(("change", "problem"), [
    (lambda folder: shutil.rmtree(folder / "good" / "samples"), "samples: cannot be read"),
    (lambda folder: [one.unlink() for one in (folder / "good" / "samples").iterdir()], "holds no samples"),
    (lambda folder: [one.write_bytes(b"x") for one in (folder / "good" / "samples").iterdir()], "can be read"),
    (lambda folder: (folder / "weights" / "a.safetensors").unlink(), "a.safetensors"),
    (lambda folder: (folder / "good" / "ledger.json").unlink(), "ledger.json"),
    (lambda folder: (folder / "good" / "ledger.json").write_text("{"), "ledger.json"),
    (lambda folder: (folder / "good" / "ledger.json").write_text('{"bundle": 3}'), "does not name the bundle"),
    (lambda folder: (folder / "good" / "ledger.json").write_text('{"bundle": "/nowhere"}'), "the ledger in"),
    (lambda folder: shutil.copy(folder / "fallen.safetensors", folder / "good.safetensors"), "newest samples are of"),
    (lambda folder: (folder / "new.safetensors").write_text("mine"), "exists already"),
])  # fmt: skip
def test_check_bad_input_is_one_line_and_writes_nothing(folder, change, problem, capsys):
    change(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    words = ["drift", "check", folder / "good", folder / "workload.yaml", "-o", folder / "new.safetensors"]
    assert main([str(word) for word in words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert problem in line and "Traceback" not in line
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_check_read_only_spool_is_checked(folder, capsys):
    (folder / "good" / DRIFT_FILE).mkdir()
    assert main(["drift", "check", str(folder / "good"), str(folder / "workload.yaml")]) == 0
    assert "the box does not get the result" in capsys.readouterr().out


def test_check_output_over_an_input_is_refused(folder):
    for out in ("good.safetensors", "workload.yaml", "good/drift.json"):
        with pytest.raises(InputError):
            check_box(folder / "good", folder / "workload.yaml", folder / out)


def test_write_substituted_nothing_is_the_same_file(folder):
    bundle = open_bundle(folder / "good.safetensors")
    write_substituted(folder / "same.safetensors", bundle, {})
    assert (folder / "same.safetensors").read_bytes() == bundle.path.read_bytes()


def test_check_on_gpu_equals_cpu(folder, monkeypatch):
    here = check_box(folder / "fallen", folder / "workload.yaml")
    with fake_gpu(monkeypatch) as mixed:
        there = check_box(folder / "fallen", folder / "workload.yaml")
    assert not mixed and there["queries"] == here["queries"]


def test_check_frames_of_one_answer_are_no_evidence(folder):
    answer(folder / "one", open_bundle(folder / "good.safetensors"), range(90), ("a",))
    for path in (folder / "one" / "samples").iterdir():
        if read_head(path).label != "busy":
            path.unlink()
    found = check_drift(folder / "one", folder / "workload.yaml")
    assert rows(found.to_json())["a"]["verdict"] == ONE_ANSWER and "no evidence" in found.to_text()
    assert read_drift(folder / "one").queries[0].verdict == ONE_ANSWER


def test_check_counts_each_sample_once(folder):
    for path in sorted((folder / "fallen" / "samples").glob("*-b-*"))[30:]:
        path.unlink()
    verdicts = [rows(check_box(folder / "fallen", folder / "workload.yaml"))["b"]["verdict"] for _ in range(4)]
    assert verdicts == [UNSURE] * 4, "thirty samples do not prove more by looking again"
    answer(folder / "fallen", open_bundle(folder / "fallen.safetensors"), range(200, 250), ("b",))
    assert rows(check_box(folder / "fallen", folder / "workload.yaml"))["b"]["verdict"] == BELOW


def test_check_of_another_bundle_begins_anew(folder):
    check_box(folder / "fallen", folder / "workload.yaml")
    state = DriftState.read(folder / "fallen", open_bundle(folder / "fallen.safetensors").digest[:12], 3)
    assert state.rows["b"].is_alarmed and not state.rows["a"].is_alarmed
    assert DriftState.read(folder / "fallen", "0" * 12, 3).rows == {}


def test_check_with_a_damaged_state_says_what_to_remove(folder, capsys):
    (folder / "good" / FILE).write_text("{")
    assert main(["drift", "check", str(folder / "good"), str(folder / "workload.yaml")]) == 2
    assert "drift-state.json" in capsys.readouterr().err
