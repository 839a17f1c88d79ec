"""The comparison of a merge with workers and without: every arm merges, and the table compares what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.merging import workers
from merger import MergeOptions, Recipe
from tests.merger.tiny import write_random_weights, write_workload

RATES = Recipe(rate=2e-3, epochs=1, frames_per_epoch=16, batch=8)


def test_every_arm_merges_and_is_compared(tmp_path: Path) -> None:
    workload = write_workload(tmp_path)
    write_random_weights(workload)
    arms = workers.measured(workload, "joint", MergeOptions(RATES, precision="fp32"), workers=2, rounds=2)
    assert [len(arm.seconds) for arm in arms.values()] == [2, 2, 2]
    assert len({frozenset(arm.work) for arm in arms.values()}) == 1 and min(arms[workers.ONE].work) > 0
    assert arms[workers.WORKERS].bundles == arms[workers.ONE].bundles and len(arms[workers.ONE].bundles) == 1

    arms[workers.WORKERS].seconds[:] = [3.0, 5.0]
    arms[workers.ALL].seconds[:] = [8.0, 8.0]
    arms[workers.ALL].bundles.add("of another rounding")
    rows = [line.strip("| ").split(" | ") for line in workers.table(arms).splitlines()[2:]]
    assert [row[0] for row in rows] == [workers.ALL, workers.ONE, workers.WORKERS]
    assert rows[2][1:3] == ["4", "0.50"] and [row[4] for row in rows] == ["another", "the same", "the same"]


def test_a_bad_workload_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert workers.main([str(tmp_path / "none.yaml")]) == workers.BAD_INPUT
    assert "none.yaml" in capsys.readouterr().err
