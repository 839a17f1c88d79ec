"""The size of each package in expressions and statements stays within its budget; what is saved stays saved."""

from __future__ import annotations

import csv

import pytest

from benchmarks.code_size import PRODUCT, count_nodes
from tests.docs.pages import REPOSITORY

BUDGETS = REPOSITORY / "tests" / "size_budgets.csv"
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
