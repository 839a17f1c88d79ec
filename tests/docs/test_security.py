"""docs/security.md: what it says is checked where, exists; its limits are the code's; its counts are of all kinds."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY
from tests.hostile.mutated.kinds import KINDS

PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([^`]+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def checking_files() -> set[str]:
    """The files that check what is read."""
    return {word for row in rows("Where each is checked") for word in NAMED.findall(row[1]) if "/" in word}


def module_of(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("row", rows("Where each is checked"), ids=lambda row: row[0])
def test_what_checks_is_defined_where_it_is_said(row: list[str]) -> None:
    defined: set[str] = set()
    for word in NAMED.findall(row[1]):
        if word.endswith(".py"):
            kinds = (ast.FunctionDef, ast.ClassDef)
            tree = ast.parse(Path(REPOSITORY / word).read_text("utf-8"))
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        else:
            assert word in defined, word


@pytest.mark.parametrize("row", rows("Limits"), ids=lambda row: row[0])
def test_a_limit_is_that_of_the_code(row: list[str]) -> None:
    file, name = NAMED.findall(row[2])
    given, unit = re.fullmatch(r"([\d,]+)(?: (KiB|MiB|GiB))?", row[1]).groups()  # type: ignore[union-attr]
    scale = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert int(given.replace(",", "")) * scale == getattr(importlib.import_module(module_of(file)), name)


def test_every_bound_of_a_reader_is_in_the_table() -> None:
    listed = {tuple(NAMED.findall(row[2])) for row in rows("Limits")}
    files = [
        REPOSITORY / word for row in rows("Where each is checked") for word in NAMED.findall(row[1]) if "/" in word
    ]
    there = {
        (str(file.relative_to(REPOSITORY)), name)
        for file in files
        for names in re.findall(r"^((?:MOST|MAX)_[A-Z_, ]+) = ", file.read_text("utf-8"), re.MULTILINE)
        for name in names.split(", ")
        if name not in ("MAX_TOLD", "MAX_PROBLEMS", "MAX_NAME_BYTES", "MAX_KEPT")  # of what is said and written
    }
    assert there <= listed, sorted(there - listed)


def test_the_counts_are_of_every_kind_and_nothing_was_found() -> None:
    counts = {cells[0]: cells[1:] for cells in rows("How it is tried") if len(cells) == 6}
    assert set(counts) == {*KINDS, "all"}
    assert all(cells[-1] == "0" for cells in counts.values())
