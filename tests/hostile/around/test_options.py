"""Every option of every command, as the parser itself tells them: what makes no sense is one line and exit code 2."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemel.cli import build_parser
from tests.exhaustive import one_in
from tests.hostile.harness import refused, refused_apart
from tests.hostile.samples import BUNDLE

GIVEN = {"WORKLOAD": "workload.yaml", "CONFIG": "box.yaml", "--query": "a", "-o": "made", "--key": "box.yaml"}
"""A sound value for what a command must be given; else the bundle."""
LONG = "x" * 5000
NUMBERS = ("x", "nan", "-inf", "inf", "-1", "1e400", "9" * 300, "0x10", "1,5", "--")
FACTORIES = ("x", "a:b:c", "../x:y", "a b:c", "nets:")
READ = ("absent", ".", "/dev/zero", "/dev/full", "pipe", "box.yaml/x", "circle", "n" * 300, "é\udcff", "a\nb")
WRITTEN = ("absent/x", ".", "box.yaml/x", "n" * 300, "/proc/x", "a\n/b")
FOLDERS = ("box.yaml", "box.yaml/x", "/proc/x")
READ_BY = {"WORKLOAD", "CONFIG", "TRACE", "OLD", "NEW", "UPDATE", "--config", "--key", "--public-key"}
NAMES = {"--device", "--memory", "--policy", "--method", "--engine", "--signature", "--query"}


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple, list]]:
    """The words of every command, with what it takes a value for."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield words, [action for action in parser._actions if action.nargs != 0]
    for action in below:
        for name, inner in action.choices.items():
            yield from commands(inner, (*words, name))


def name_of(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def line(words: tuple, actions: list, instead: argparse.Action, *given: str) -> list[str]:
    """A whole command line, where these words stand for one of its options."""
    made = list(words)
    for action in actions:
        if action is instead:
            made += [] if action.option_strings else given
        elif action.required or not action.option_strings:
            made += [*action.option_strings[:1], GIVEN.get(name_of(action), BUNDLE)]
    return [*made, *(given if instead.option_strings else ())]


def bad(action: argparse.Action) -> tuple[str, ...]:
    """What makes no sense for an option."""
    name, kinds = name_of(action), {*action.option_strings, str(action.metavar)}
    if action.choices or kinds & NAMES:
        return ("nope", "../../x")
    if "--factory" in kinds:
        return FACTORIES
    if action.type is not None:
        return NUMBERS[:-1] if action.option_strings else NUMBERS
    if kinds & READ_BY or "BUNDLE" in str(action.metavar):
        return READ
    if kinds & {"DIR"}:
        return FOLDERS
    return WRITTEN if name == "-o" else ()


COMMANDS = [(words, actions) for words, actions in commands(build_parser()) if actions]
CASES = [(words, action, actions) for words, actions in COMMANDS for action in actions]


@pytest.fixture(scope="module")
def folder(whole_house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files to be named, whose content nobody comes to."""
    made = tmp_path_factory.mktemp("named")
    for name in ("workload.yaml", "box.yaml", BUNDLE, "gate.mp4"):
        (made / name).symlink_to(whole_house / name)
    for name in ("data", "weights"):
        (made / name).symlink_to(whole_house / name)
    os.mkfifo(made / "pipe")
    (made / "circle").symlink_to("circle")
    return made


@pytest.mark.parametrize(
    ("words", "action", "actions"),
    one_in(3, CASES),
    ids=[f"{' '.join(words)} {name_of(action)}" for words, action, _ in CASES],
)
def test_a_value_that_makes_no_sense_is_one_line_and_exit_code_2(
    folder: Path, words: tuple, action: argparse.Action, actions: list
) -> None:
    name = name_of(action)
    for value in (*bad(action), "", LONG):
        if action.option_strings:
            word = f"{name}={value}" if name.startswith("--") else f"{name}{value}" if value else None
            given = [word] if word else [name, ""]
        else:
            given = [value]
        refused(line(words, actions, action, *given), folder)
    if action.option_strings:
        assert name in refused(line(words, actions, action, name), folder)
        if isinstance(action, argparse._StoreAction):
            twice = [name, str(next(iter(action.choices or ["1"])))] * 2
            said = refused(line(words, actions, action, *twice), folder)
            assert name in said and ": is given twice" in said


def test_a_command_that_is_none_is_one_line(folder: Path) -> None:
    for words in ("", "nope", "bundle", "bundle nope", "--nope", "inspect --nope", "plan a b"):
        assert "usage" not in refused(words.split(), folder)


def test_bytes_that_are_no_utf8_are_told_by_their_escapes(folder: Path) -> None:
    assert "\\udcff" in refused_apart(["inspect", "\udcff.yaml"], folder)
