"""Accuracy over time of `adaptive` where that is its objective: the catalogue on all modelled devices.

Usage: python -m benchmarks.schedule.accuracy --json FILE [--seconds S]

A case is a workload on a device at min, 50 % or 75 % of what its originals need, merged at the ceiling, with the
recorded staleness curve of each task (`objective.py`). Cases that FILE has of the same code are not played again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.schedule.cases import SETTINGS, arrivals_of, case_of, catalogue, markdown
from benchmarks.schedule.objective import CURVES, accuracy_over_time, at_rate, curves
from benchmarks.schedule.playing import Row, code_of
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import coalesce_tensors, memory_settings
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.models.workload import load_workload

EARLIER = {"min": 0.779, "50%": 0.789, "75%": 0.791}
"""The means of the scheduler of commit e385a78."""
HEADS = ("memory", "cases", "accuracy over time", "before", "difference")


def play_case(path: Path, device: str, seconds: float) -> Iterator[Row]:
    """A row for each memory setting: the accuracy over time of every query."""
    case, known = case_of(path, device), curves()
    tasks = {query.id: query.task for query in load_workload(path).queries}
    worth = {query: at_rate(known[task][1], known[task][0], case.demands[query].fps) for query, task in tasks.items()}
    demands = {query: replace(demand, staleness=worth[query]) for query, demand in case.demands.items()}
    costs, arrivals = coalesce_tensors(case.shared), arrivals_of(case.demands, seconds, 0)
    for setting in SETTINGS:
        played = simulate(costs, arrivals, memory_settings(case.apart)[setting], POLICIES["adaptive"], demands)
        accuracy = [round(one, 4) for one in accuracy_over_time(played, case.demands, worth)]
        yield {"workload": case.workload, "device": device, "memory": setting, "accuracy": accuracy}


def mean_rows(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each memory setting."""
    found = []
    for setting in SETTINGS:
        means = [fmean(row["accuracy"]) for row in rows if row["memory"] == setting]
        mean = fmean(means)
        found.append((setting, len(means), round(mean, 4), EARLIER[setting], f"{mean - EARLIER[setting]:+.4f}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    asked = {"code": code_of(__file__, str(CURVES)), "seconds": args.seconds}
    kept = json.loads(args.json.read_text()) if args.json.exists() else {}
    rows: list[Row] = kept["cases"] if all(kept.get(key) == value for key, value in asked.items()) else []
    done = {(row["workload"], row["device"]) for row in rows}
    for path in catalogue():
        for device in PROFILES:
            if (path.stem, device) not in done:
                rows += play_case(path, device, args.seconds)
                args.json.write_text(json.dumps({**asked, "date": date.today().isoformat(), "cases": rows}) + "\n")
    print(markdown(HEADS, mean_rows(rows)))


if __name__ == "__main__":
    main()
