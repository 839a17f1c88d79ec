"""The driver of `make real`: each step once, nothing half-done counts, figures as they came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks.real import real
from benchmarks.real import tables as real_tables
from gemel.edge_runtime.life.config import load_config

QUERIES = ("far-vehicle", "near-vehicle")


class Box:
    """Stands in for the command line: writes what the commands write, and can fail or be interrupted on one."""

    def __init__(self, stumble: str = "", outcome: int | type[BaseException] = 0) -> None:
        self.commands: list[list[str]] = []
        self.stumble, self.outcome = stumble, outcome

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        words = list(command[3:] if command[2] == "gemel" else command[2:])
        self.commands.append(words)
        text = " ".join(words)
        if self.stumble and self.stumble in text:
            if not isinstance(self.outcome, int):
                raise self.outcome
            return self.outcome, json.dumps(self.answer(words)) if self.outcome == 1 else ""
        return 0, json.dumps(self.answer(words))

    def answer(self, words: list[str]) -> dict:
        if words[0] == "benchmarks.data.prepare":
            out = real.REPOSITORY / words[words.index("--out") + 1]
            document = {
                "cameras": {"far": {"source": "clips/far", "fps": 5}, "near": {"source": "clips/near.mp4"}},
                "queries": [{"id": q, "camera": q.split("-")[0], "fps": 5} for q in QUERIES],
            }
            out.mkdir(parents=True, exist_ok=True)
            (out / "workload.yaml").write_text(yaml.safe_dump(document))
            return {}
        if words[0] == "train":
            return {
                "queries": [
                    {"id": words[words.index("--query") + 1], "metric": "f1", "val": 0.9, "test": 0.8, "seconds": 3.0}
                ]
            }
        if words[0] == "merge":
            query = {
                "metric": "f1",
                "original": 0.8,
                "merged": 0.79,
                "ratio": 0.9875,
                "met": True,
                "state": "not proven",
            }
            query |= {"chance_corrected": 0.9, "worth": words[words.index("--method") + 1] == real.SHIPPED}
            return {
                "method": words[words.index("--method") + 1], "bytes_before": 2**21, "bytes_after": 2**20,
                "saved_fraction": 0.5, "ceiling_fraction": 0.6, "seconds": 9.0, "flops": 1e15,
                "queries": [{"id": q, **query} for q in QUERIES],
            }  # fmt: skip
        if words[0] == "simulate":
            return {"memory_bytes": 133456, "budget_bytes": 123456}
        if words[0] == "eval":
            row = {"memory": "min", "memory_bytes": 2**20, "metric": "f1", "accuracy": 0.5, "age_p95_ms": 90.0}
            return {"streaming": [{"arm": arm, "query": q, **row} for arm in ("merged", "originals") for q in QUERIES]}
        if words[0] == "run":
            row = {"received": 5, "processed": 3, "late": 0, "failed": 0, "pending": 0, "dropped": {"deadline": 2}}
            return {"ledger": [{"query": q, **row} for q in QUERIES]}
        return {}


def names_of(commands: list[list[str]]) -> list[str]:
    return [words[0] for words in commands]


def test_a_workload_runs_from_footage_to_report(tmp_path: Path):
    box = Box()
    steps = real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, box)
    order = names_of(box.commands)
    assert order[:4] == ["benchmarks.data.prepare", "inspect", "train", "train"]
    assert order.index("run") < order.index("eval") and order.count("merge") == len(real.METHODS)
    merged = [words[words.index("--method") + 1] for words in box.commands if words[0] == "merge"]
    assert merged == ["none", "top-down", "gemel"]
    assert steps.result("merge-gemel") is not None


def test_what_is_done_is_not_done_again(tmp_path: Path):
    real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, Box())
    again = Box()
    real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, again)
    assert again.commands == []


def test_an_interrupted_step_is_run_again_and_resumes(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, Box("--method gemel", KeyboardInterrupt))
    assert not (tmp_path / "out" / "steps" / "merge-gemel.json").exists()
    again = Box()
    real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, again)
    assert again.commands[0][0] == "merge" and "--resume" in again.commands[0] and "gemel" in again.commands[0]


def test_a_missed_target_is_a_figure_and_a_fault_is_not(tmp_path: Path):
    steps = real.run_workload("gti", tmp_path, tmp_path / "short", real.METHODS, Box("--method gemel", 1))
    done = steps.result("merge-gemel")
    assert done is not None and done["exit_code"] == 1
    with pytest.raises(real.StepFailed) as failed:
        real.run_workload("gti", tmp_path, tmp_path / "bad", real.METHODS, Box("train", 2))
    assert failed.value.code == 2 and "gemel train" in str(failed.value)
    assert not (tmp_path / "bad" / "steps" / "train-far-vehicle.json").exists()


def test_a_bundle_without_figures_is_merged_again(tmp_path: Path):
    out = tmp_path / "out"
    left = real.bundle_of(out, "none")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"written, then interrupted")
    real.run_workload("gti", tmp_path, out, real.METHODS, Box())
    assert not left.exists()  # the stand-in writes none


def test_the_box_plays_each_camera_in_the_budget(tmp_path: Path):
    real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, Box())
    config = yaml.safe_load((tmp_path / "out" / "box.yaml").read_text())
    assert load_config(tmp_path / "out" / "box.yaml").budget_bytes == 123456
    assert config["budget"] == 123456
    assert config["sinks"] == [{"kind": "jsonl", "path": "results.jsonl"}]
    assert config["bundle"] == "bundles/top-down.safetensors"
    assert config["cameras"]["near"] == {"source": "clips/near.mp4", "fps": 5}


def test_recorded_commands_are_seen_from_the_repository(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(real, "REPOSITORY", tmp_path)
    steps = real.run_workload("gti", tmp_path.parent / "data", tmp_path / "out" / "gti", real.METHODS, Box())
    recorded = "".join(path.read_text() for path in steps.folder.glob("*.json"))
    assert '"gemel merge out/gti/workload.yaml -o out/gti/bundles/none.safetensors' in recorded
    assert '"python -m benchmarks.data.prepare gti --data ../data --out out/gti"' in recorded
    assert str(tmp_path) not in recorded


def test_the_tables_hold_the_figures(tmp_path: Path):
    steps = real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, Box("--method gemel", 1))
    text = real_tables.tables("gti", steps.folder)
    assert "| far-vehicle | f1 | 0.900 | 0.800 | 3 |" in text
    assert "| top-down | 2.000 | 1.000 | 0.500 | 0.833 | 2 of 2 | 0.988 | 1e+15 | 9 |" in text
    assert "| near-vehicle | f1 | 0.800 | 0.790 | 0.988 | 0.900 | yes | not proven | yes |" in text
    assert "| gemel | 2.000 | 1.000 | 0.500 | 0.833 | 0 of 2 |" in text  # met, but by originals worth nothing
    assert "| originals | min | 1.000 | 0.500 | 0.500 | 90.000 |" in text
    assert "| far-vehicle | 5 | 3 | 0 | 0 | 0 | 2 |" in text
    assert sys.executable not in text


def test_tables_of_an_unfinished_run_show_what_there_is(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        real.run_workload("gti", tmp_path, tmp_path / "out", real.METHODS, Box("eval", KeyboardInterrupt))
    text = real_tables.tables("gti", tmp_path / "out" / "steps")
    assert "### Originals" in text and "Streaming" not in text


def test_bad_arguments_are_refused(tmp_path: Path, capsys):
    assert real.main(["nowhere", "--out", str(tmp_path)]) == 2
    assert real.main(["gti", "--methods", "gemel", "--out", str(tmp_path)]) == 2
    assert real.main(["gti", "--data", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "MANIFEST.json" in capsys.readouterr().err


def test_a_terminated_run_ends_its_step_too(tmp_path: Path):
    """SIGTERM to the driver alone: the command it waits for must not go on by itself."""
    witness = tmp_path / "child"
    child = f"import os, pathlib, time; pathlib.Path({str(witness)!r}).write_text(str(os.getpid())); time.sleep(60)"
    code = (
        f"import signal, sys; sys.path.insert(0, {str(real.REPOSITORY)!r})\n"
        f"from benchmarks.real import real\nreal.WORKLOADS = ('gti',)\n"
        f"real.data_folder = lambda given, repository: repository\n"
        f"real.run_workload = lambda *given: real.call([sys.executable, '-c', {child!r}])\n"
        f"sys.exit(real.main(['gti', '--out', {str(tmp_path)!r}]))"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while driver.poll() is None and not (witness.is_file() and witness.read_text()):
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == real.TERMINATED and "goes on from here" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(witness.read_text()), 0)
