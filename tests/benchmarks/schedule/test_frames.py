"""The digest of all code that a policy's recorded figures depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.schedule.frames import POLICY_CODE, code_of, files_of
from benchmarks.schedule.speed import deciding_rows, planning_rows
from gemel import edge_runtime

ROOT = Path(next(iter(edge_runtime.__path__)))


def used_by(files: set[Path]) -> set[Path]:
    """These files of edge_runtime and all that they import from it when they are loaded."""
    found, left = set(files), list(files)
    while left:
        for node in ast.parse(left.pop().read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gemel.edge_runtime."):
                place = ROOT.joinpath(*str(node.module).split(".")[2:])
                file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                if file not in found:
                    found.add(file)
                    left.append(file)
    return found


@pytest.mark.parametrize("policy", sorted(POLICY_CODE))
def test_files_of_policy_cover_all_code_it_uses(policy):
    covered = set(files_of(policy))
    assert used_by(covered) <= covered, "name what was moved in SHARED_CODE or POLICY_CODE"
    assert {ROOT / "simulation/simulator.py", ROOT / "scheduler/eviction.py"} <= covered


def test_code_of_differs_between_policies():
    assert len({code_of(policy) for policy in POLICY_CODE}) == len(POLICY_CODE)


def test_planning_and_deciding_rows_are_by_policy():
    policies = ("adaptive", "gemel", "time-sharing")
    places = [{"queries": 1000, "memory": "min", "policy": name} for name in policies]
    planned = [{**place, "seconds": at} for at, place in enumerate(places)]
    assert planning_rows(planned) == [("1,000", "min", "2.00 s", "1.00 s", "0.00 s")]
    decided = [{**place, "median_us": 2.0, "p99_us": 9.0} for place in places]
    assert deciding_rows(decided) == [("1000", "min", *["2 / 9"] * 3)]
