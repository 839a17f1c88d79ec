"""The promise of `adaptive` on workloads that it was not tuned on: never fewer frames than the paper's schedule."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.schedule.bound import upper_bound
from benchmarks.schedule.cases import SETTINGS, arrivals_of, case_of
from benchmarks.schedule.drawn import write_drawn
from benchmarks.schedule.frames import code_of
from edge_runtime.policies import POLICIES
from edge_runtime.scheduler.costs import coalesced, memory_settings
from edge_runtime.simulation.device_profiles import PROFILES
from edge_runtime.simulation.simulator import simulate

BOTH = ("gemel", "adaptive")
SUM_SHARE, QUERY_SHARE, FROM_FRAMES = 0.98, 0.8, 20
"""Of the frames that `gemel` brings: in sum, and of each query to which it brings so many."""
ROOM = 0.98
"""Who has this part of a bound that no schedule can beat leaves nothing to win."""
HEADS = (
    "memory", "cases", "frames", "gemel", "adaptive", "adaptive / gemel", "more / as many / fewer",
    "`gemel` below 0.98 of the bound", "more / as many / fewer of these", "least sum", "least query", "kept",
)  # fmt: skip

Row = dict[str, Any]


def play(seed: int, workloads: int, seconds: float, file: Path, limit_s: float | None = None) -> list[Row]:
    """A row per drawn workload, device and memory setting; what `file` has of the same code is not played again.

    Workload by workload: where `limit_s` is over before all are played, what was is a random part of them.
    """
    code, started = [code_of(name) for name in BOTH], time.monotonic()
    asked = {"seed": seed, "seconds": seconds, "code": code}
    kept = json.loads(file.read_text()) if file.exists() else {}
    rows: list[Row] = kept["cases"] if all(kept.get(key) == value for key, value in asked.items()) else []
    done = {row["number"] for row in rows}
    for number in range(workloads):
        if number in done:
            continue
        if limit_s is not None and time.monotonic() - started > limit_s:
            break
        rows += _of_workload(seed, number, seconds)
        whole = file.with_suffix(".part")
        date = time.strftime("%Y-%m-%d", time.gmtime())
        whole.write_text(json.dumps({**asked, "date": date, "workloads": workloads, "cases": rows}) + "\n")
        whole.replace(file)
    return rows


def _of_workload(seed: int, number: int, seconds: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_drawn(Path(folder), seed, number)
        for device in PROFILES:
            case = case_of(path, device)
            costs, arrivals = coalesced(case.shared), arrivals_of(case.demands, seconds, 0)
            fps = {query: demand.fps for query, demand in case.demands.items()}
            for setting in SETTINGS:
                budget = memory_settings(case.apart)[setting]
                played = [simulate(costs, arrivals, budget, POLICIES[name], case.demands) for name in BOTH]
                in_time = [[row["processed"] - row["late"] for row in one.per_query()] for one in played]
                received = sum(map(len, arrivals.values()))
                bound = round(upper_bound(costs, arrivals, fps, budget), 1)
                yield {
                    "number": number, "device": device, "memory": setting, "received": received, "bound": bound,
                    **dict(zip(BOTH, in_time, strict=True)),
                }  # fmt: skip


def shares(row: Row) -> tuple[float, float]:
    """What `adaptive` has of `gemel`'s frames: in sum, and the least of any query that has FROM_FRAMES."""
    paper, ours = sum(row["gemel"]), sum(row["adaptive"])
    least = [mine / theirs for theirs, mine in zip(*(row[name] for name in BOTH)) if theirs >= FROM_FRAMES]
    return ours / paper if paper else 1.0, min(least, default=1.0)


def broken(rows: Sequence[Row]) -> list[Row]:
    """The cases in which the promise was not kept."""
    return [row for row in rows if (least := shares(row))[0] < SUM_SHARE or least[1] < QUERY_SHARE]


def promise_rows(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each memory setting, and for all."""
    found = []
    for setting in (*SETTINGS, "all"):
        chosen = [row for row in rows if setting in (row["memory"], "all")]
        paper, ours = (sum(sum(row[name]) for row in chosen) for name in BOTH)
        room = [row for row in chosen if sum(row["gemel"]) < ROOM * row["bound"]]
        found.append((
            setting, len(chosen), sum(row["received"] for row in chosen), paper, ours, f"{ours / max(1, paper):.3f}",
            _compared(chosen), len(room), _compared(room),
            f"{min(shares(row)[0] for row in chosen):.3f}", f"{min(shares(row)[1] for row in chosen):.2f}",
            f"{len(chosen) - len(broken(chosen))} of {len(chosen)}",
        ))  # fmt: skip
    return found


def _compared(rows: Sequence[Row]) -> str:
    """In how many cases `adaptive` has more frames than `gemel`, as many, and fewer."""
    more = [sum(row["adaptive"]) - sum(row["gemel"]) for row in rows]
    return " / ".join(str(sum((one > 0) - (one < 0) == sign for one in more)) for sign in (1, 0, -1))
