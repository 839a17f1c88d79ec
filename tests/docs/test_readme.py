"""The README: its table of folders is the tree, its commands run on a workload, its shares stand in the figures."""

from __future__ import annotations

import re

import pytest

from gemel.cli import main
from tests.docs.pages import REPOSITORY
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


def test_its_commands_run_on_a_workload(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_weights(write_workload(tmp_path, frames=12))
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"(?:^    |`)gemel ([^#`\n]+)", README, re.MULTILINE)
    asked = {command.split()[0]: command.split() for command in commands}
    assert asked.keys() == {"merge", "run", "eval", "inspect", "train"}
    for name in ("inspect", "train"):
        assert main(asked[name]) == 0
    assert main([*asked["merge"], "--method", "none"]) in (0, 1)  # untrained originals are no evidence
    assert (tmp_path / asked["merge"][-1]).is_file()
