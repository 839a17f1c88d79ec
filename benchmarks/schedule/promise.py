"""`adaptive` against `gemel` on drawn workloads that it was not tuned on: frames in time, in sum and of each query.

Tuned on seeds below 500; the recorded table is of seeds from 90,000 on, which were never used before. A case is a
workload on one of the modelled devices in one memory setting.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.schedule.cases import SETTINGS, arrivals_of, case_of
from benchmarks.schedule.drawn import write_drawn
from benchmarks.schedule.frames import code_of
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import coalesce_tensors, memory_settings
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.edge_runtime.simulation.simulator import simulate

BOTH = ("gemel", "adaptive")
SUM_SHARE, QUERY_SHARE, FROM_FRAMES = 0.98, 0.8, 20
"""Of the frames that `gemel` brings: in sum, and of each query to which it brings so many."""
HEADS = (
    "memory", "cases", "frames", "gemel", "adaptive", "adaptive / gemel", "mean of the cases", "more / as many / fewer",
    "sum kept", "each query kept", "least sum", "least query",
)  # fmt: skip

Row = dict[str, Any]


def play(seed: int, workloads: int, seconds: float, file: Path, limit_s: float | None = None) -> list[Row]:
    """A row per drawn workload, device and memory setting; what `file` has of the same code is not played again.

    One workload a seed, from `seed` on; where `limit_s` is over before all are played, the first of them were.
    """
    code, started = [code_of(name) for name in BOTH], time.monotonic()
    asked = {"seed": seed, "seconds": seconds, "code": code}
    kept = json.loads(file.read_text()) if file.exists() else {}
    rows: list[Row] = kept["cases"] if all(kept.get(key) == value for key, value in asked.items()) else []
    done = {row["seed"] for row in rows}
    for own in range(seed, seed + workloads):
        if own in done:
            continue
        if limit_s is not None and time.monotonic() - started > limit_s:
            break
        rows += _play_workload(own, seconds)
        whole = file.with_suffix(".part")
        date = time.strftime("%Y-%m-%d", time.gmtime())
        whole.write_text(json.dumps({**asked, "date": date, "workloads": workloads, "cases": rows}) + "\n")
        whole.replace(file)
    return rows


def _play_workload(seed: int, seconds: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_drawn(Path(folder), seed, 0)
        for device in PROFILES:
            case = case_of(path, device)
            costs, arrivals = coalesce_tensors(case.shared), arrivals_of(case.demands, seconds, 0)
            for setting in SETTINGS:
                budget = memory_settings(case.apart)[setting]
                played = [simulate(costs, arrivals, budget, POLICIES[name], case.demands) for name in BOTH]
                in_time = [[row["processed"] - row["late"] for row in one.per_query()] for one in played]
                received = sum(map(len, arrivals.values()))
                yield {
                    "seed": seed, "device": device, "memory": setting, "received": received,
                    **dict(zip(BOTH, in_time, strict=True)),
                }  # fmt: skip


def shares(row: Row) -> tuple[float, float]:
    """What `adaptive` has of `gemel`'s frames: in sum, and the least of any query that has FROM_FRAMES."""
    gemel, adaptive = sum(row["gemel"]), sum(row["adaptive"])
    least = [mine / theirs for theirs, mine in zip(*(row[name] for name in BOTH)) if theirs >= FROM_FRAMES]
    return adaptive / gemel if gemel else 1.0, min(least, default=1.0)


def broken_cases(rows: Sequence[Row]) -> list[Row]:
    """The cases in which `adaptive` gave too few frames in sum, or to a query."""
    return [row for row in rows if (least := shares(row))[0] < SUM_SHARE or least[1] < QUERY_SHARE]


def promise_rows(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each memory setting, and for all."""
    found = []
    for setting in (*SETTINGS, "all"):
        chosen = [row for row in rows if setting in (row["memory"], "all")]
        gemel, adaptive = (sum(sum(row[name]) for row in chosen) for name in BOTH)
        sums, least = zip(*map(shares, chosen))
        found.append((
            setting, len(chosen), sum(row["received"] for row in chosen), gemel, adaptive,
            f"{adaptive / max(1, gemel):.3f}", f"{fmean(sums):.3f}", count_comparisons(chosen),
            f"{100 * fmean(one >= SUM_SHARE for one in sums):.1f} %",
            f"{100 * fmean(one >= QUERY_SHARE for one in least):.1f} %", f"{min(sums):.3f}", f"{min(least):.2f}",
        ))  # fmt: skip
    return found


def count_comparisons(rows: Sequence[Row]) -> str:
    """In how many cases `adaptive` has more frames than `gemel`, as many, and fewer."""
    more = [sum(row["adaptive"]) - sum(row["gemel"]) for row in rows]
    return " / ".join(str(sum((one > 0) - (one < 0) == sign for one in more)) for sign in (1, 0, -1))
