"""What a recorded figure of a policy is told apart by: a digest of all the code that it depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import edge_runtime
from benchmarks.schedule.frames import POLICY_CODE, code_of, files_of

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
    assert {ROOT / "rehearsal/simulator.py", ROOT / "schedule/room.py"} <= covered


def test_policies_that_share_code_have_digests_of_their_own():
    assert len({code_of(policy) for policy in POLICY_CODE}) == len(POLICY_CODE)
