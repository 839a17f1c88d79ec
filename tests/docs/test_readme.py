"""The README: its table of folders is the tree, its commands run on a workload, its shares stand in the figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gemel.cli import main
from tests.docs.pages import REPOSITORY
from tests.edge_runtime.tiny import write_clip
from tests.merger.tiny import write_random_weights, write_workload

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_its_table_of_folders_is_the_tree() -> None:
    named = set(re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE))
    made = {"out", "build", "__pycache__"}
    folders = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and path.name not in made}
    folders = {name for name in folders if not name.startswith(".") and not name.endswith(".egg-info")}
    assert named == folders


def test_its_first_lines_say_what_it_gains() -> None:
    first = " ".join(README.splitlines()[2:7])
    assert "one copy of the weights" in first and re.search(r"\d+ %", first) and "docs/figures.md" in first


def test_it_is_one_page() -> None:
    assert len(README.splitlines()) <= 60


def test_its_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_weights(write_workload(tmp_path, frames=12))
    write_clip(tmp_path / "none.mp4", 4)
    box = {"bundle": "box.safetensors", "budget": "64MiB", "engine": "torch", "cameras": {"c": {"source": "none.mp4"}}}
    box |= {"factories": ["tests.merger.tiny:tiny_net"], "sinks": [{"kind": "jsonl", "path": "results.jsonl"}]}
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(box))
    monkeypatch.chdir(tmp_path)
    boxes = [{"id": "north", "device": "jetson-nano", "memory": "64MiB", "count": 2}]
    city = {"name": "city", "boxes": boxes, "workloads": ["workload.yaml"]}
    (tmp_path / "city.yaml").write_text(yaml.safe_dump(city))
    commands = re.findall(r"(?:^    |`)gemel ([^#`\n]+)", README, re.MULTILINE)
    asked = {command.split()[0]: command.split() for command in commands}
    assert asked.keys() == {"inspect", "train", "merge", "run", "eval", "place"}
    asked["merge"] += ["--method", "none"]  # as quick as it gets
    for name in ("inspect", "train", "merge", "run", "eval", "place"):
        assert main(asked[name]) in (0, 1), name  # untrained originals are no evidence, so a merge may fall short
    assert (tmp_path / "placed" / "placement.json").is_file()
    assert (tmp_path / "results.jsonl").read_text() and (tmp_path / "report" / "report.html").is_file()
