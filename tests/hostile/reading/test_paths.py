"""Paths that mean harm, wherever a path may stand: on the command line, in a workload, in a box's config."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.exhaustive import paired
from tests.hostile.asking import A, ask
from tests.hostile.harness import Seen, refused, tried

LONG, LONGER = "x" * 300, "/".join(["x" * 200] * 30)
NAMES: dict[str, str] = {
    "nothing there": "missing",
    "nothing": "",
    "a NUL": "a\0b",
    "half a character": "\ud800",
    "bytes that are no text": "\udcff\udcfe",
    "a name too long": LONG,
    "a path too long": LONGER,
    "a file for a folder": "gate.mp4/x",
    "a line of its own": "x\n/etc/passwd: sound",
    "a terminal's": "\x1b[2J",
    "a memory": "/proc/self/mem",
    "/dev/zero": "/dev/zero",
    "/dev/full": "/dev/full",
    "/dev/null": "/dev/null",
    "/dev/tty": "/dev/tty",
}
MADE: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "two links in a circle": lambda path: (path.symlink_to("other"), path.with_name("other").symlink_to(path)),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "nothing in it": Path.touch,
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "10 GB": lambda path: (path.touch(), os.truncate(path, 10**10)),
    "garbage in a name of no text": lambda path: path.write_bytes(bytes(range(256)) * 100),
}
NO_OUTPUTS = (
    "a NUL", "half a character", "a name too long", "a path too long", "a folder", "a file for a folder", "nothing",
    "a link to itself", "/dev/full", "a pipe",
)  # fmt: skip
KINDS = [*NAMES, *MADE]
COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "@"],
    "inspect --weights": ["inspect", "@", "--weights"],
    "train": ["train", "@"],
    "merge": ["merge", "@", "-o", "new"],
    "eval, the bundle": ["eval", "@", "workload.yaml", "-o", "new"],
    "eval, the workload": ["eval", "b.safetensors", "@", "-o", "new"],
    "run": ["run", "@"],
    "run --check": ["run", "@", "--check"],
    "plan": ["plan", "@"],
    "simulate": ["simulate", "@", "--duration", "1"],
    "profile": ["profile", "@"],
    "bundle show": ["bundle", "show", "@"],
    "bundle diff": ["bundle", "diff", "@", "b.safetensors", "-o", "new"],
    "bundle apply": ["bundle", "apply", "b.safetensors", "@", "-o", "new"],
}
FEW = ("inspect", "merge", "run --check", "bundle show", "bundle apply")
OUTPUTS: dict[str, list[str]] = {
    "merge": ["merge", "workload.yaml", "-o", "@"],
    "eval": ["eval", "b.safetensors", "workload.yaml", "-o", "@"],
    "bundle diff": ["bundle", "diff", "b.safetensors", "b.safetensors", "-o", "@"],
}


def _name(house: Path, kind: str) -> str:
    """Such a path, made where it must be."""
    if kind in NAMES:
        return NAMES[kind]
    name = "\udcff.made" if "no text" in kind else "made"
    MADE[kind](house / name)
    return name


def _with(command: list[str], name: str) -> list[str]:
    return [name if part == "@" else part for part in command]


def _one_line(seen: Seen) -> str:
    """The last line, and above it nothing but how far a command had come."""
    line = seen.err.splitlines()[-1]
    assert seen.held().code == 2 and not seen.changed and line.startswith("gemel") and line.isprintable(), seen
    return line


@pytest.mark.parametrize(("command", "kind"), paired(COMMANDS, KINDS, FEW))
def test_a_command_reads_nothing_that_it_should_not(house: Path, command: str, kind: str) -> None:
    refused(_with(COMMANDS[command], _name(house, kind)), house)


@pytest.mark.parametrize("kind", NO_OUTPUTS)
@pytest.mark.parametrize("command", OUTPUTS.values(), ids=OUTPUTS)
def test_a_command_writes_nowhere_that_it_should_not(house: Path, command: list[str], kind: str) -> None:
    if (command[0], kind) == ("eval", "a folder"):
        return  # it may write into one
    _one_line(tried(_with(command, _name(house, kind)), house))


@pytest.mark.parametrize(("key", "kind"), paired(["weights", "init", "data"], KINDS))
def test_a_workload_names_nothing_that_hurts(house: Path, key: str, kind: str) -> None:
    name = _name(house, kind)
    asked = {**A, "weights": "new.safetensors", key: name}
    workload = ask(house, asked)
    if key == "weights":
        _one_line(tried(["merge", workload, "-o", "new"], house))
    elif (key, name) != ("init", "") and (key, kind) != ("data", "nothing"):
        _one_line(tried(["train", workload], house))
    seen = tried(["inspect", workload], house).held()
    assert seen.code in (0, 2) and not seen.changed
    assert all(line.startswith(("warning: ", "gemel: ")) for line in seen.err.splitlines()), seen.err


@pytest.mark.parametrize(("key", "kind"), paired(["bundle", "source", "spool", "trace", "sink"], KINDS))
def test_a_config_names_nothing_that_hurts(house: Path, key: str, kind: str) -> None:
    name = _name(house, kind)
    config = yaml.safe_load((house / "box.yaml").read_text())
    if key == "source":
        config["cameras"]["gate"]["source"] = name
    elif key == "sink":
        config["sinks"][0]["path"] = name
    else:
        config[key] = name
    (house / "box.yaml").write_text(yaml.safe_dump(config))
    seen = tried(["run", "box.yaml", "--check"], house).held()
    assert seen.code in (0, 2) and not seen.changed, seen
    assert all(line.isprintable() and len(line) < 1000 for line in seen.err.splitlines())
    assert seen.code == 2 or key != "bundle"
    assert seen.code == 0 or seen.err.count("\n") == 1
    if key == "source" and seen.code == 0:  # a box starts without a camera, and tries it again
        assert "camera gate does not answer: " in seen.err
