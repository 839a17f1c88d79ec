"""The paper's claims beside what was recorded: worked out from the records, nothing typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import figures, paper
from benchmarks.merging.cells import Cell
from benchmarks.schedule.cases import WORKLOADS, catalogue
from benchmarks.schedule.objective import ACCURACY, APART, PAPER


def cell(workload: str, arm: str, saved: float, ceiling: float = 0.5, work: float = 1e12) -> Cell:
    result = {"saved_fraction": saved, "ceiling_fraction": ceiling, "work": work}
    return cast("Cell", SimpleNamespace(workload=workload, label=arm, result=result))


def played(apart: float, theirs: float, ours: float) -> dict:
    return {"arms": {APART: {"accuracy": [apart]}, PAPER: {"accuracy": [theirs]}, ACCURACY: {"accuracy": [ours]}}}


def test_the_catalogue_has_its_fifteen_workloads_and_no_other():
    kinds = {"low": 3, "medium": 6, "high": 6}
    assert [path.stem for path in catalogue()] == sorted(
        f"{kind}-{number}" for kind, count in kinds.items() for number in range(1, count + 1)
    )


@pytest.mark.parametrize("name", ["low-1", "medium-3"])
def test_what_is_recorded_of_a_workload_is_what_it_weighs(name):
    kept = figures._read(figures.MEASURED / "paper" / "catalogue.json")["catalogue"]
    (row,) = [one for one in kept if one["workload"] == name]
    assert paper.weighed(WORKLOADS / f"{name}.yaml") == row


def test_claims_are_judged_by_what_was_reached():
    weights = [
        {"ceiling_fraction": 0.2, "half_in": 1, "layers": 10},
        {"ceiling_fraction": 0.8, "half_in": 2, "layers": 10},
    ]
    cells = [cell("gti", "wide", 0.4), cell("gti", "wide", 0.5), cell("gti", "gemel", 0.3), cell("gti", "joint", 0.9)]
    less, points, few, near, *_ = paper.claim_rows(weights, [played(0.5, 0.55, 0.6), played(0.5, 0.5, 0.5)], cells)
    assert less[1:] == (
        "20.0% to 80.0% if all that can is shared, median 50.0%",
        "gti `gemel` 30.0%, `wide` 45.0%",
        "no",
    )
    assert "+0.0 to +10.0 points, +5.0 on average (2 cases" in points[1] and points[3] == "in few cases"
    assert few[1].endswith("median 15%") and few[3] == "yes"
    assert near[2] == "of the ceiling: gti `gemel` 0.600, `wide` 0.900"
    more = paper.claim_rows(weights, [played(0.5, 0.6, 0.6)], [cell("gti", "wide", 0.61)])
    assert (more[0][3], more[1][3]) == ("yes", "yes")
