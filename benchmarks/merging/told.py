"""What merges said that they would take, beside what they took: the first of its kind, and the same again.

Usage: python -m benchmarks.merging.told WORKLOAD... [--epochs 4] [--frames-per-epoch 512] [--seeds 0 1]

Every workload is merged twice for each seed, in an empty folder. `flops told` is the part of the ladder's bound that
the forecast of a first merge counts (gemel.merger.forecast.FORECAST.used_fraction), `used` the part that was spent.
Time is the processor's where `--processor` is given, for machines that are shared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import machine
from gemel.merger import MergeOptions, Recipe, merge
from gemel.merger import forecast as forecasts
from gemel.merger.prices import Spending
from gemel.models.workload import load_workload
from gemel.text import number, table

PRICES = "currency: usd\nkinds: {here: {price: 1}}\n"


def main() -> None:
    """Print a row for each merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--frames-per-epoch", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--accept-unproven", action="store_true")
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    recipe, rows = Recipe(epochs=given.epochs, frames_per_epoch=given.frames_per_epoch), []
    clock = time.process_time if given.processor else time.monotonic
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(time, "monotonic", clock):
        for workload in given.workloads:
            for seed in given.seeds:
                prices = Path(folder) / f"{len(rows)}.yaml"
                prices.write_text(PRICES)
                options = MergeOptions(recipe, accept_unproven=given.accept_unproven, spending=Spending.parse(prices))
                for which in ("first", "again"):
                    rows.append((workload.parent.name, seed, which, *merge_once(workload, prices, seed, options)))
                    print(rows[-1], file=sys.stderr, flush=True)
    print(table(("workload", "seed", "merge", "told s", "paid s", "paid / told", "used of the bound"), rows))
    print(f"\n{machine()}")


def merge_once(workload: Path, prices: Path, seed: int, options: MergeOptions) -> tuple[Any, ...]:
    """Seconds said and taken, their ratio, and the part of the ladder's bound that was spent."""
    bounds = list[tuple[float, float]]()
    expect = forecasts.Forecast.expect

    def record(self: forecasts.Forecast, bound: Any) -> None:
        if bound is not None and not bounds:
            bounds.append((self._ctx.flops.total, bound()))
        expect(self, bound)

    with mock.patch.object(forecasts.Forecast, "expect", record), tempfile.TemporaryDirectory() as folder:
        report = merge(load_workload(workload), Path(folder) / "b.safetensors", seed=seed, options=options)
    cost = report.cost
    assert cost is not None and cost.told_seconds is not None
    before, bound = bounds[0]
    used = (report.flops - before) / bound if bound else None
    told, paid = cost.told_seconds, cost.seconds
    return number(told, 1), number(paid, 1), number(paid / told), number(used)


if __name__ == "__main__":
    main()
