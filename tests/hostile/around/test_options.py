"""Every option of every command: a value that makes no sense is one line and exit code 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemel.cli import command_tree
from tests.exhaustive import one_in
from tests.hostile.harness import refused, refused_apart
from tests.hostile.samples import BUNDLE

GIVEN = {"WORKLOAD": "workload.yaml", "CONFIG": "box.yaml", "--query": "a", "-o": "made", "--key": "box.yaml"}
"""A sound value for what a command needs; for other arguments the bundle."""
NUMBERS = ("x", "nan", "-inf", "inf", "-1", "1e400", "9" * 300, "0x10", "1,5")
FACTORIES = ("x", "a:b:c", "../x:y", "a b:c", "nets:")
READ = ("absent", ".", "/dev/zero", "/dev/full", "pipe", "box.yaml/x", "circle", "n" * 300, "é\udcff", "a\nb")
WRITTEN = ("absent/x", ".", "box.yaml/x", "n" * 300, "/proc/x", "a\n/b")
FOLDERS = ("box.yaml", "box.yaml/x", "/proc/x")
READ_BY = {"WORKLOAD", "CONFIG", "OLD", "NEW", "UPDATE", "--replay", "--config", "--key", "--public-key"}
NAMES = {"--device", "--memory", "--policy", "--method", "--engine", "--signature", "--query", "--precision",
         "--weights", "--objective", "--shared"}  # fmt: skip


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The words of every command, with the parameters that take a value."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), [one for one in command.params if not getattr(one, "is_flag", False)]


def name_of(parameter: Any) -> str:
    return parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.metavar)


def line(words: tuple[str, ...], parameters: list[Any], instead: Any, value: str) -> list[str]:
    """A whole command line with this value for one parameter."""
    made, last = list(words), []
    for parameter in parameters:
        name = name_of(parameter)
        if parameter is instead:
            last = [name, value] if name.startswith("-") else [value]
            made += [] if name.startswith("-") else last
        elif parameter.required:
            made += [name, GIVEN.get(name, BUNDLE)] if name.startswith("-") else [GIVEN.get(name, BUNDLE)]
    return [*made, *(last if name_of(instead).startswith("-") else ())]


def bad_values(parameter: Any) -> tuple[str, ...]:
    name, metavar = name_of(parameter), str(parameter.metavar)
    if name in NAMES:
        return ("nope", "../../x")
    if name == "--factory":
        return FACTORIES
    if metavar in ("N", "S", "N|dynamic"):
        return NUMBERS
    if name in READ_BY or "BUNDLE" in metavar:
        return READ
    if metavar == "DIR":
        return FOLDERS
    return WRITTEN if name == "-o" else ()


CASES = [(words, one, parameters) for words, parameters in commands(command_tree()) for one in parameters]


@pytest.fixture(scope="module")
def folder(whole_house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named")
    for name in ("workload.yaml", "box.yaml", BUNDLE, "gate.mp4", "data", "weights"):
        (made / name).symlink_to(whole_house / name)
    os.mkfifo(made / "pipe")
    (made / "circle").symlink_to("circle")
    return made


@pytest.mark.parametrize(
    ("words", "parameter", "parameters"),
    one_in(3, CASES),
    ids=[f"{' '.join(words)} {name_of(one)}" for words, one, _ in CASES],
)
def test_option_bad_value_is_one_line(folder: Path, words: tuple, parameter: Any, parameters: list) -> None:
    for value in bad_values(parameter):
        refused(line(words, parameters, parameter, value), folder)


def test_command_unknown_is_one_line(folder: Path) -> None:
    for words in ("", "nope", "bundle", "bundle nope", "--nope", "inspect --nope", "plan a b"):
        assert "Usage" not in refused(words.split(), folder)


def test_path_not_utf8_is_escaped(folder: Path) -> None:
    assert "\\udcff" in refused_apart(["inspect", "\udcff.yaml"], folder)
