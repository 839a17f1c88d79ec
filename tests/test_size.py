"""Size and vague names of each package stay within their budgets; what is saved stays saved."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.code_size import PRODUCT, count_nodes, count_vague_names
from tests.docs.pages import REPOSITORY

BUDGETS = REPOSITORY / "tests" / "size_budgets.csv"
VAGUE_BUDGETS = REPOSITORY / "tests" / "vague_names.csv"
VAGUE_SLACK = 20
"""Bindings by which a budget may be above the count."""
SLACK = 0.02
"""A budget that is further above the count is lowered, so that the next change cannot use it up."""


def read_budgets() -> dict[str, int]:
    with open(BUDGETS, newline="", encoding="utf-8") as file:
        return {row["package"]: int(row["nodes"]) for row in csv.DictReader(file)}


def test_every_package_has_a_budget_with_a_reason() -> None:
    assert read_budgets().keys() == set(PRODUCT)
    with open(BUDGETS, newline="", encoding="utf-8") as file:
        assert all(row["reason of the last raise"] for row in csv.DictReader(file))


@pytest.mark.parametrize("package", PRODUCT)
def test_package_is_within_its_budget(package: str) -> None:
    nodes, budget = count_nodes((REPOSITORY / package).resolve()), read_budgets()[package]
    assert nodes <= budget, f"{package} has {nodes}: delete something, or raise {BUDGETS.name} with a reason"
    assert nodes >= (1 - SLACK) * budget, f"{package} has only {nodes}: lower its budget in {BUDGETS.name}"


@pytest.mark.parametrize("package", PRODUCT)
def test_package_binds_no_more_vague_names(package: str) -> None:
    with open(VAGUE_BUDGETS, newline="", encoding="utf-8") as file:
        budget = {row["package"]: int(row["bindings"]) for row in csv.DictReader(file)}[package]
    count = count_vague_names((REPOSITORY / package).resolve())
    assert count <= budget, f"{package} binds {count} names such as found and one: take the noun of the value"
    assert count >= budget - VAGUE_SLACK, f"{package} binds only {count}: lower its budget in {VAGUE_BUDGETS.name}"


def test_vague_names_of_assignments_loops_and_fields_are_counted(tmp_path: Path) -> None:
    code = "class Pair:\n    kept: int\nfound = [one for one in range(3)]\nfor other in found:\n    rest = other\n"
    (tmp_path / "module.py").write_text(code)
    assert count_vague_names(tmp_path.resolve()) == 4
