"""Frames in time by each policy and by the bound, case by case; what is measured is kept and not done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.schedule.bound import upper_bound
from benchmarks.schedule.cases import ORDER, SETTINGS, SimulatedCase, arrivals_of, case_of, catalogue
from gemel import edge_runtime
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import coalesce_tensors, memory_settings
from gemel.edge_runtime.simulation.simulator import simulate

MIN_SHARE, SUM_SHARE = 0.8, 0.98
SHARED_CODE = (
    "scheduler",
    "frames/queues.py",
    "memory/allocator.py",
    "simulation/device_profiles.py",
    "simulation/simulator.py",
)
POLICY_CODE = {
    "time-sharing": ("policies/gemel.py", "policies/time_sharing.py"),
    "gemel": ("policies/gemel.py",),
    "adaptive": ("policies",),
}
SUM_HEADS = (
    "memory",
    "device",
    "frames",
    *ORDER,
    "bound",
    "adaptive / gemel",
    "adaptive / bound",
    "workloads with more / fewer",
    "worst query",
)

Row = dict[str, Any]


def code_of(policy: str) -> str:
    """A digest of the code that a policy's figures depend on, so that those of other code are not taken for its own."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files_of(policy))).hexdigest()[:12]


def files_of(policy: str) -> list[Path]:
    """The files of that code."""
    root = Path(next(iter(edge_runtime.__path__)))
    places = [root / name for name in (*SHARED_CODE, *POLICY_CODE[policy])]
    return [file for place in places for file in (sorted(place.glob("*.py")) if place.is_dir() else [place])]


def measure(devices: Iterable[str], seconds: float, seeds: int, kept: Path | None) -> list[Row]:
    """One row per workload, device and memory setting; what the file `kept` has of the same code is not done again."""
    code = {name: code_of(name) for name in ORDER}
    known = {
        _place(row): row
        for row in read([kept] if kept and kept.exists() else [])
        if (row["seconds"], row["seeds"]) == (seconds, seeds)
    }
    rows = dict(known)
    for path in catalogue():
        for device in devices:
            places = [(path.stem, device, setting) for setting in SETTINGS]
            if all(place in known and known[place]["code"] == code for place in places):
                continue
            case = case_of(path, device)
            for place in places:
                row = rows[place] = _row(case, place[2], seconds, seeds, code, known.get(place))
                print(_line(row), flush=True)
                if kept:
                    write(kept, list(rows.values()))
    return list(rows.values())


def _place(row: Row) -> tuple[str, str, str]:
    return row["workload"], row["device"], row["memory"]


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of several files."""
    return [row for file in files for row in json.loads(file.read_text())["frames"]]


def write(file: Path, rows: list[Row]) -> None:
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps({"date": datetime.now(timezone.utc).date().isoformat(), "frames": rows}) + "\n")
    whole.replace(file)


def _row(
    case: SimulatedCase, setting: str, seconds: float, seeds: int, code: Mapping[str, str], known: Row | None
) -> Row:
    shared = coalesce_tensors(case.shared)
    budget = memory_settings(case.apart)[setting]
    streams = [arrivals_of(case.demands, seconds, seed) for seed in range(seeds)]
    old = known or {"code": {}, "in_time": {}, "moved": {}, "bound": None}
    stale = [name for name in ORDER if old["code"].get(name) != code[name]]
    in_time = {**old["in_time"], **{name: dict.fromkeys(case.demands, 0) for name in stale}}
    moved = {**old["moved"], **dict.fromkeys(stale, 0)}
    for name in stale:
        for arrivals in streams:
            played = simulate(shared, arrivals, budget, POLICIES[name], case.demands)
            moved[name] += played.bytes_moved
            for one in played.per_query():
                in_time[name][one["id"]] += one["processed"] - one["late"]
    bound = old["bound"]
    if bound is None:
        fps = {query: demand.fps for query, demand in case.demands.items()}
        bound = sum(upper_bound(shared, arrivals, fps, budget) for arrivals in streams)
    received = {query: int(seconds * demand.fps) * seeds for query, demand in case.demands.items()}
    return {
        "workload": case.workload,
        "device": case.device,
        "memory": setting,
        "memory_bytes": budget,
        "seconds": seconds,
        "seeds": seeds,
        "code": dict(code),
        "received": received,
        "in_time": in_time,
        "bound": bound,
        "moved": moved,
    }


def total(row: Row, name: str) -> int:
    """A policy's frames in time over all queries and seeds."""
    return sum(row["in_time"][name].values())


def ratios(row: Row) -> dict[str, float]:
    """Each query's frames in time under `adaptive`, over those under `gemel` where there were any."""
    paper = row["in_time"]["gemel"]
    return {query: row["in_time"]["adaptive"][query] / count for query, count in paper.items() if count}


def worst(row: Row) -> tuple[float, str]:
    """The query with the least ratio; 1 where `gemel` gave none any frame."""
    return min(((ratio, query) for query, ratio in ratios(row).items()), default=(1.0, "-"))


def _line(row: Row) -> str:
    ratio, query = worst(row)
    counts = "  ".join(f"{name} {total(row, name)}" for name in ORDER)
    return (
        f"{row['workload']} {row['device']} {row['memory']}: {counts}  bound {row['bound']:.0f}  "
        f"worst {ratio:.2f} ({query})"
    )


def sums(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of SUM_HEADS for each memory setting and device, and for all devices together."""
    lines = []
    for setting in SETTINGS:
        for device in (*dict.fromkeys(row["device"] for row in rows), "all"):
            chosen = [row for row in rows if row["memory"] == setting and device in (row["device"], "all")]
            if not chosen:
                continue
            counts = {name: sum(total(row, name) for row in chosen) for name in ORDER}
            bound = sum(row["bound"] for row in chosen)
            received = sum(sum(row["received"].values()) for row in chosen)
            more, fewer = (
                sum(sign * (total(row, "adaptive") - total(row, "gemel")) > 0 for row in chosen) for sign in (1, -1)
            )
            lines.append(
                (
                    setting,
                    device,
                    received,
                    *counts.values(),
                    round(bound),
                    f"{counts['adaptive'] / counts['gemel']:.3f}",
                    f"{counts['adaptive'] / bound:.2f}",
                    f"{more} / {fewer} of {len(chosen)}",
                    f"{min(worst(row)[0] for row in chosen):.2f}",
                )
            )
    return lines


def misses(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The cases in which `adaptive` has less than SUM_SHARE of `gemel`'s frames, or a query less than MIN_SHARE of its
    own."""
    return [
        _line(dict(row))
        for row in rows
        if total(dict(row), "adaptive") < SUM_SHARE * total(dict(row), "gemel") or worst(dict(row))[0] < MIN_SHARE
    ]
