"""docs/architecture.md: the files of its walks exist and define what the walks name; its rooms are those there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = ("A weight's walk", "A frame's walk")
NAMED = re.compile(r"`([^`]+)`")
HOUSE = ("gemel", "merger", "edge_runtime", "models", "video_samples")


def steps(walk: str) -> list[str]:
    """The numbered lines below a heading."""
    part = PAGE.split(f"## {walk}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. .*(?:\n {3}.*)*", part, re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_about_a_dozen_steps(walk: str) -> None:
    assert 8 <= len(steps(walk)) <= 14


@pytest.mark.parametrize("step", [step for walk in WALKS for step in steps(walk)])
def test_a_step_names_a_file_and_what_it_defines(step: str) -> None:
    names: set[str] = set()
    found = 0
    for word in NAMED.findall(step):
        if word.endswith(".py"):
            names = defined(REPOSITORY / word)
        elif "/" not in word:
            found += 1
            assert word in names, f"{word} is not in the file named before it"
    assert found


@pytest.mark.parametrize("package", HOUSE)
def test_every_room_has_a_row(package: str) -> None:
    rooms = {f"{package}/{door.parent.name}/" for door in (REPOSITORY / package).glob("*/__init__.py")}
    assert rooms <= set(NAMED.findall(PAGE))


def test_the_floors_are_the_packages() -> None:
    floors = PAGE.split("## The floors")[1].split("\n\n| room")[0]
    assert {f"{package}/" for package in HOUSE} == {name for name in NAMED.findall(floors) if name.endswith("/")}
