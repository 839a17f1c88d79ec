"""The paper's claims beside what was recorded: worked out from the records, nothing typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import figures, paper
from benchmarks.merging.cells import Cell
from benchmarks.schedule.cases import WORKLOADS, catalogue
from benchmarks.schedule.objective import ACCURACY, APART, PAPER


def cell(workload: str, arm: str, saved: float, ceiling: float = 0.5, flops: float = 1e12) -> Cell:
    result = {"saved_fraction": saved, "ceiling_fraction": ceiling, "flops": flops}
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
    twice = [played(0.5, 0.55, 0.6), played(0.5, 0.5, 0.5)]
    less, points, few, near, *_ = paper.claim_rows(weights, twice, cells, [])
    assert less[1:] == (
        "20.0% to 80.0% if all that can is shared, median 50.0%",
        "gti `gemel` 30.0%, `wide` 45.0%",
        "no",
    )
    assert "+0.0 to +10.0 points, +5.0 on average (2 cases" in points[1] and points[3] == "in few cases"
    assert few[1].endswith("median 15%") and few[3] == "yes"
    assert near[2] == "of the ceiling: gti `gemel` 0.600, `wide` 0.900"
    more = paper.claim_rows(weights, [played(0.5, 0.6, 0.6)], [cell("gti", "wide", 0.61)], [])
    assert (more[0][3], more[1][3]) == ("yes", "yes")


def ordered(workload: str, arm: str, *saved: float) -> Cell:
    steps = [(0.0, 0.0), *((10.0 * (number + 1), share) for number, share in enumerate(saved))]
    options = {"options": {"max_flops": 40.0}}
    return cast("Cell", SimpleNamespace(
        workload=workload, label=arm, arm=arm, share=saved[-1], asked=options, accepted=lambda: steps,
        ceiling_bytes=1.0, met=len(saved), queries=[0] * 4,
    ))  # fmt: skip


@pytest.mark.parametrize(("latest", "agrees"), [(0.5, "yes"), (0.6, "all but `latest`"), (0.9, "all but `latest`")])
def test_orders_of_the_search_are_compared_after_the_same_work(latest, agrees):
    cells = [ordered("cifar", "gemel", 0.2, 0.4, 0.6), ordered("cifar", "latest", 0.1, 0.3)]
    cells += [ordered("gti", "gemel", 0.6), ordered("gti", "latest", 0.0, 0.1, latest)]
    cells += [ordered("gti", "latest", 0.2, 0.3, latest)]
    assert paper.order_rows(cells)[0] == ("cifar", "memory", "40", "0.200", "0.400", "0.600", "3 of 4")
    assert paper.order_rows(cells)[3][3:5] == ("0.100 (0.000..0.200)", "0.200 (0.100..0.300)")
    weights = [{"ceiling_fraction": 0.2, "half_in": 1, "layers": 10}]
    *_, row = paper.claim_rows(weights, [played(0.5, 0.6, 0.6)], [], cells)
    told = f"cifar `gemel` 0.600, `latest` 0.300; gti `gemel` 0.600, `latest` {latest:.3f}"
    assert row[2:] == (f"of the ceiling with the same work: {told}", agrees)
