"""docs/architecture.md: its walks name what the files define, its tables the packages and folders."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = ("The walk of a weight", "The walk of a frame")
NAMED = re.compile(r"`([^`]+)`")
PACKAGES = ("gemel", "merger", "edge_runtime", "models", "video_samples")


def steps(walk: str) -> list[str]:
    """The numbered lines below a heading."""
    part = PAGE.split(f"## {walk}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. .*(?:\n {3}.*)*", part, re.MULTILINE)


def defined_names(path: Path) -> set[str]:
    """Functions, classes and methods of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)}


@pytest.mark.parametrize("walk", WALKS)
def test_walk_has_about_a_dozen_steps(walk: str) -> None:
    assert 8 <= len(steps(walk)) <= 14


@pytest.mark.parametrize("step", [step for walk in WALKS for step in steps(walk)])
def test_walk_step_names_what_the_file_defines(step: str) -> None:
    names: set[str] = set()
    found = 0
    for word in NAMED.findall(step):
        if word.endswith(".py"):
            names = defined_names(REPOSITORY / word)
        elif "/" not in word:
            found += 1
            assert word in names, f"{word} is not in the file named before it"
    assert found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_has_a_row(package: str) -> None:
    inner = [init.parent for init in (REPOSITORY / package).glob("*/__init__.py") if not init.parent.is_symlink()]
    folders = {f"{package}/{folder.name}/" for folder in inner}
    assert folders <= set(NAMED.findall(PAGE))


def test_layers_are_the_packages() -> None:
    layers = PAGE.split("## Layers")[1].split("\n\n| folder")[0]
    assert {f"{package}/" for package in PACKAGES} == {name for name in NAMED.findall(layers) if name.endswith("/")}
