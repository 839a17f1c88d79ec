"""The digest of all code that a policy's recorded figures depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import edge_runtime
from benchmarks.schedule.cases import SETTINGS
from benchmarks.schedule.frames import POLICY_CODE, claims, code_of, files_of
from benchmarks.schedule.speed import overhead_rows, planning_rows

ROOT = Path(next(iter(edge_runtime.__path__)))


def used_by(files: set[Path]) -> set[Path]:
    """These files of edge_runtime and all that they import from it when they are loaded."""
    found, left = set(files), list(files)
    while left:
        for node in ast.parse(left.pop().read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("edge_runtime."):
                place = ROOT.joinpath(*str(node.module).split(".")[1:])
                file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                if file not in found:
                    found.add(file)
                    left.append(file)
    return found


@pytest.mark.parametrize("policy", sorted(POLICY_CODE))
def test_a_policys_digest_covers_all_code_that_its_figures_depend_on(policy):
    covered = set(files_of(policy))
    assert used_by(covered) <= covered, "name what was moved in SHARED_CODE or POLICY_CODE"
    assert {ROOT / "simulation/simulator.py", ROOT / "scheduler/eviction.py"} <= covered


def test_policies_that_share_code_have_digests_of_their_own():
    assert len({code_of(policy) for policy in POLICY_CODE}) == len(POLICY_CODE)


def test_claims_count_what_is_bad_too():
    ours, paper = [{"a": 5, "b": 0}, {"a": 4, "b": 0}, {"a": 10, "b": 0}], [4, 5, 10]
    rows = [
        {"workload": "w", "device": "d", "memory": memory, "received": {"a": 10, "b": 10}, "bound": 20.0,
         "in_time": {"adaptive": mine, "gemel": {"a": theirs, "b": 0}, "time-sharing": {"a": 0, "b": 0}}}
        for memory, mine, theirs in zip(SETTINGS, ours, paper, strict=True)
    ]  # fmt: skip
    assert [measured for _, measured in claims(rows)] == [
        "1 of 3", "1; 0", "20 % (w, d, 50%)", "1 of 2", "-20.0 % (w, d)", "d 1",
    ]  # fmt: skip


def test_seconds_and_microseconds_stand_by_policy():
    policies = ("adaptive", "gemel", "time-sharing")
    planned = [{"queries": 1000, "memory": "min", "policy": name, "seconds": at} for at, name in enumerate(policies)]
    assert planning_rows(planned) == [("1,000", "min", "2.00 s", "1.00 s", "0.00 s")]
    spent = [{"memory": "min", "policy": name, "us_per_frame": at} for name in policies for at in (1.0, 2.0, 9.0)]
    assert overhead_rows(spent) == [("min", *["2 / 9"] * 3)]
