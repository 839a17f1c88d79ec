"""What computes holds on processors with fewer instructions too, as far as those can be taken from this one.

oneDNN and torch choose among their variants by these settings once, when they are loaded: so each setting is a process.
What is run so is what asks oneDNN how weights are to lie, and what compares or trains by numbers that round otherwise.

Trainings that round otherwise end in other weights: what merges them is run on originals of other seeds, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = (
    "tests/edge_runtime/memory",
    "tests/edge_runtime/engines/eager",
    "tests/edge_runtime/engines/test_sharing.py",
    "tests/merger/training",
    "tests/merger/start",
    "tests/merger/mending",
    "tests/merger/bench",
    "tests/models/zoo",
    "tests/models/parts",
    "tests/models/sharing",
)
NO_AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
NO_AVX = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}


MERGING = ("tests/merger", "tests/benchmarks/merging", "tests/benchmarks/compression")
MIN_AT_ONCE = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fewer", [NO_AVX512, NO_AVX], ids=["no-avx512", "no-avx"])
def test_what_computes_holds_with_fewer_instructions(repository: Path, fewer: dict[str, str]) -> None:
    _run_so(repository, fewer, FOLDERS)


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", ["1", "34", "43"])
def test_merges_hold_on_other_originals(repository: Path, seed: str) -> None:
    _run_so(repository, {"GEMEL_TESTS_SEED": seed}, MERGING, *MIN_AT_ONCE)


def _run_so(repository: Path, settings: dict[str, str], folders: tuple[str, ...], *options: str) -> None:
    missing = [folder for folder in folders if not (repository / folder).exists()]
    assert not missing
    # the tests of a worker of xdist are not to take themselves for more workers
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *options, *folders,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=repository, env=inherited | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
