"""Outputs that name inputs: one line that says which, before anything is opened, and every file stays as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.harness import refused

WORKLOAD = """
name: one
cameras: {gate: {source: gate.mp4, fps: 5}}
queries:
  - {id: a, camera: gate, task: classification, classes: [x, y], model: cifar_resnet20, input_size: 32,
     weights: out.log.jsonl, data: data}
"""
INPUTS = {"b.safetensors": "bundle", "box.yaml": "config", "gate.mp4": "source of camera gate",
          "b.safetensors.profile.json": "profile"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in INPUTS:
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def _named(folder: Path, name: str, how: str) -> str:
    """Another name of a file."""
    if how == "itself":
        return name
    if how == "dots":
        return f"../{folder.name}/{name}"
    if how == "link":
        (folder / "other").symlink_to(folder / name)
    else:
        os.link(folder / name, folder / "other")
    return "other"


@pytest.mark.parametrize("how", ["itself", "dots", "link", "hard link"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("key", ["trace", "sinks[0].path", "spool"])
def test_a_box_writes_to_nothing_that_it_reads(folder: Path, key: str, name: str, how: str) -> None:
    other = _named(folder, name, how)
    config: dict[str, Any] = {"bundle": "b.safetensors", "budget": "1MiB", "cameras": {"gate": {"source": "gate.mp4"}}}
    if key == "trace":
        config["trace"] = other
    elif key == "spool":
        if how == "dots":
            return
        (folder / "spool").mkdir()
        os.link(folder / name, folder / "spool" / "ledger.json")
        config["spool"] = "spool"
    else:
        config["sinks"] = [{"kind": "jsonl", "path": other}]
    config_path = folder / "box.yaml"
    config_path.write_text(json.dumps(config))  # in place: what is linked to it stays so
    said = refused(["run", config_path, "--check"], folder)
    assert said.startswith(f"gemel: {config_path}: {key}: ") and INPUTS[name] in said
    assert said.endswith("; name a file that is nothing else")


def test_a_trace_and_a_sink_are_two_files(folder: Path) -> None:
    config = {"bundle": "b.safetensors", "budget": "1MiB", "cameras": {"gate": {"source": "gate.mp4"}},
              "trace": "new.jsonl", "sinks": [{"kind": "jsonl", "path": "./new.jsonl"}]}  # fmt: skip
    (folder / "box.yaml").write_text(json.dumps(config))
    said = refused(["run", "box.yaml"], folder)
    assert "box.yaml: sinks[0].path: " in said and "is what 'trace' names" in said


@pytest.mark.parametrize(
    ("out", "which"),
    [("w.yaml", "is the workload"), ("out", "is the weights of a"), ("data/test/x/f.png", "in the data of a"),
     ("link", "is the workload")],
)  # fmt: skip
@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["merge", "resume"])
def test_a_merge_writes_to_nothing_that_it_reads(folder: Path, out: str, which: str, resume: list[str]) -> None:
    (folder / "w.yaml").write_text(WORKLOAD)
    (folder / "out.log.jsonl").write_bytes(b"weights")
    (folder / "data" / "test" / "x").mkdir(parents=True)
    (folder / "link").symlink_to("w.yaml")
    said = refused(["merge", "w.yaml", "-o", out, *resume], folder)
    assert said.startswith(f"gemel: {out}") and "--out: " in said and which in said


@pytest.mark.parametrize("kept", [b"bundle", b"", b" <svg"])
def test_a_picture_goes_over_nothing_but_a_picture(folder: Path, kept: bytes) -> None:
    (folder / "b.safetensors").write_bytes(kept)
    said = refused(["inspect", "--zoo", "--picture", "b.safetensors"], folder)
    assert said.startswith("gemel: b.safetensors: exists already and is no such picture")
