"""`gemel run` as a process: results on stdout alone, and a ledger that adds up however it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemel.cli import main
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.workload import load_workload
from gemel.models.zoo import build, input_size_of
from gemel.summaries import box_text, checked_text

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
BOX = """
bundle: tiny.safetensors
budget: {budget}
device: cpu
cameras: {{gate: {{source: gate.mp4, fps: 5, loop: {loop}}}}}
sinks: [{{kind: jsonl, path: {sink}}}]
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory, write_tiny):
    """A folder with a bundle of two classifiers and the clip of their camera."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("box")
    queries = load_workload(write_tiny(root)).queries
    models = {query.id: build(query.model, query.classes, {}, input_size_of(query), query.task) for query in queries}
    records = [BundleQuery.of(query) for query in queries]
    write_bundle(root / "tiny.safetensors", models, records, Made("tiny", "none", 0))
    return root


def write_config(box, budget="64MiB", loop="false", sink="results.jsonl"):
    path = box / f"box-{loop}.yaml"
    path.write_text(BOX.format(budget=budget, loop=loop, sink=sink))
    return path


def test_run_check_starts_nothing(box, capsys):
    assert main(["run", str(write_config(box)), "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"] is True and checked["warnings"] == [] and checked["http"] is None
    assert checked["cameras"] == [{"id": "gate", "answers": True, "width": 32, "height": 24}]
    assert [(sink["kind"], sink["answers"]) for sink in checked["sinks"]] == [("jsonl", True)]
    shown = checked_text("box.yaml", checked)
    assert "box.yaml: sound; " in shown and "cameras: gate 32x24" in shown and "results.jsonl" in shown
    assert not (box / "results.jsonl").exists()


def test_run_too_small_budget_is_bad_input(box, capsys):
    assert main(["run", str(write_config(box, budget="1MiB"))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gemel: ") and "budget" in error


def test_run_stdout_holds_results_only(box):
    command = [sys.executable, "-m", "gemel", "run", str(write_config(box, sink='"-"'))]
    done = subprocess.run(command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results and all({"query", "camera", "captured_at", "label"} <= set(result) for result in results)
    assert "(cameras ended)" in done.stderr and "ledger: " not in done.stderr
    assert "leaked" not in done.stderr, "what is left at exit is no leak of a library"


def test_run_with_a_log_of_json_writes_nothing_else_to_stderr(box):
    command = [sys.executable, "-m", "gemel", "run", "--log-format", "json", str(write_config(box))]
    done = subprocess.run(command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=240, check=False)
    rows = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 0 and rows[-1]["summary"]["balanced"] is True
    starts = next(row["message"] for row in rows if "starts: box" in row["message"])
    assert "tiny.safetensors" in starts and "box-false.yaml" in starts
    assert any(row["message"] == "camera gate streams" and row["camera"] == "gate" for row in rows)
    wrong = write_config(box, budget="1MiB")
    done = subprocess.run(
        [*command[:-1], str(wrong)], cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and rows[-1]["level"] == "error" and "budget" in rows[-1]["message"]


def test_run_failed_camera_gives_exit_code_1(box, capsys, tmp_path):
    path = write_config(box, sink=str(tmp_path / "results.jsonl"))
    path.write_text(path.read_text().replace("gate.mp4", "absent.mp4"))
    assert main(["run", str(path), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    camera = summary["cameras"][0]
    assert camera["state"] == "ended" and "there is no " in camera["error"]
    assert f"camera gate: {camera['error']}" in box_text(summary)
