"""Numerical code holds on CPUs with older instruction sets, and merging on originals of other seeds.

oneDNN and torch choose their kernels by environment variables once, at import, so each setting runs in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("tests/edge_runtime/memory", "tests/edge_runtime/engines", "tests/merger", "tests/models")
NO_AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
NO_AVX = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}


MERGING = ("tests/merger", "tests/benchmarks/merging", "tests/benchmarks/compression")
XDIST = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("environment", [NO_AVX512, NO_AVX], ids=["no-avx512", "no-avx"])
def test_numerics_older_instruction_set_hold(repository: Path, environment: dict[str, str]) -> None:
    _run_pytest(repository, environment, FOLDERS)


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", ["1", "34", "43"])
def test_merges_originals_of_other_seeds_hold(repository: Path, seed: str) -> None:
    _run_pytest(repository, {"GEMEL_TESTS_SEED": seed}, MERGING, *XDIST)


def _run_pytest(repository: Path, settings: dict[str, str], folders: tuple[str, ...], *options: str) -> None:
    missing = [folder for folder in folders if not (repository / folder).exists()]
    assert not missing
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *options, *folders,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=repository, env=inherited | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
