"""Merging against the rivals of swapping: whole models swapped, and whole models streamed layer by layer.

Usage: python -m benchmarks.schedule.rivals --json FILE [--seconds S]

Every workload of the catalogue on every modelled device, with memory for 10, 25 and 50 % of all its weights and for the
largest workspace beside them. Arms, each with the best it can do:

- swapped: the originals, whole; turns as in the paper's time-sharing, or our schedule, whichever gives more frames; a
  model too large for the budget overflows.
- streamed: the originals layer by layer (`benchmarks/schedule/streamed.py`); the window and what stays are chosen
  on these very frames, and so is the schedule, the paper's or ours.
- merged: at the ceiling, swapped by our schedule or streamed, whichever gives more frames.

Beside them what the originals would bring with memory for all, where nothing is copied: no arm can be expected to bring
much more.

Goes on where it was stopped. Loads do not overlap with runs except where a model is streamed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.schedule.cases import WORKLOADS, arrivals_of, catalogue, markdown
from benchmarks.schedule.playing import Row, code_of, play
from benchmarks.schedule.streamed import URGENT, WINDOWS, StreamedCosts, stream_costs, streamed_layers
from gemel.analytic_costs import merge_at_ceiling, workload_originals
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors
from gemel.edge_runtime.scheduler.eviction import overflow_of
from gemel.edge_runtime.simulation.device_profiles import PROFILES, costs_for, overflow_layers
from gemel.edge_runtime.simulation.simulator import Simulation, age_p95_ms, simulate
from gemel.models.bundle import Bundle
from gemel.models.workload import load_workload
from gemel.planner import DEFAULT_FPS

SHARES = (0.1, 0.25, 0.5)
SWAPPED, STREAMED, MERGED = ARMS = ("swapped", "streamed", "merged")
HEADS = (
    "memory", "sharing", "cases", "frames", *ARMS, "memory for all",
    "merged / best rival", "cases with twice as many", "more", "fewer",
    "queries without a frame", "MB moved a frame", "age p95 ms, median",
)  # fmt: skip
DEVICE_HEADS = (HEADS[0], "device", *HEADS[2:])
LEFT_HEADS = (
    "memory", "cases in which a rival has 98 % of what memory for all brings", "the others: best rival", "merged",
    "memory for all", "most that merged has of the best rival",
)  # fmt: skip
ENOUGH = 0.98
OURS, THEIRS, APART = "adaptive", "gemel", "time-sharing"

Demands = Mapping[str, QuerySpec]


def frames_and_bytes(played: Simulation, run_bytes: Mapping[str, int]) -> Row:
    """Frames in time, bytes moved by loads and by runs, and the 95th percentile of ages."""
    runs = {(frame.query, frame.started_at) for frame in played.frames if frame.started_at is not None}
    ages = [one.finished_at - one.captured_at for one in played.frames if one.finished_at is not None]
    copied = sum(run_bytes.get(query, 0) for query, _ in runs)
    by_query = [row["processed"] - row["late"] for row in played.per_query()]
    moved, age = played.bytes_moved + copied, age_p95_ms(ages)
    return {"in_time": sum(by_query), "by_query": by_query, "moved": moved, "age_p95_ms": age}


def best(rows: Iterable[tuple[str, Row]]) -> Row:
    """The row with most frames in time, and which way it was."""
    way, row = max(rows, key=lambda one: one[1]["in_time"])
    return {**row, "way": way}


def costs_to_swap(costs: Costs, bundle: Bundle, budget: int) -> tuple[Costs, Mapping[str, int]]:
    """The costs where what is too large alone overflows, and the bytes that such a query copies in a run."""
    queries = {query.id: query for query in bundle.queries}
    within = overflow_of(costs, budget, lambda query: overflow_layers(bundle, queries[query]))
    return coalesce_tensors(within.costs), within.run_bytes


def best_streamed(make: Callable[[float, float], StreamedCosts], played: Callable[[Costs, str], Simulation]) -> Row:
    """The best window and choice of what stays, under the paper's turns, and then the better schedule."""
    tried = []
    for window, urgent in product(WINDOWS, URGENT):
        one = make(window, urgent)
        row = frames_and_bytes(played(one.costs, THEIRS), one.run_bytes)
        tried.append((f"window {window:g}, urgent {urgent:g}", row, one))
    way, row, one = max(tried, key=lambda found: found[1]["in_time"])
    return best(
        [(f"{way}, {THEIRS}", row), (f"{way}, {OURS}", frames_and_bytes(played(one.costs, OURS), one.run_bytes))]
    )


def rows_of(workload: str, device: str, seconds: str) -> list[Row]:
    """A row for each budget of one workload on one device."""
    queries, profile = load_workload(WORKLOADS / f"{workload}.yaml").queries, PROFILES[device]
    demands = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    arrivals = arrivals_of(demands, float(seconds), 0)
    bundles = {False: workload_originals(queries), True: merge_at_ceiling(queries)}
    costs = {merged: costs_for(profile, bundle) for merged, bundle in bundles.items()}
    layers = {merged: streamed_layers(profile, bundle) for merged, bundle in bundles.items()}
    whole = [costs[merged].resident_bytes(costs[merged].tensor_bytes.keys()) for merged in (False, True)]
    workspace = max(cost.workspace_bytes for cost in costs[False].queries.values())
    everything = {
        policy: sum(row["processed"] - row["late"] for row in simulate(
            coalesce_tensors(costs[False]), arrivals, whole[0] + workspace, POLICIES[policy], demands
        ).per_query())
        for policy in (THEIRS, OURS)
    }  # fmt: skip
    rows = []
    for share in SHARES:
        budget = round(share * whole[0]) + workspace

        def play_policy(of: Costs, policy: str, budget: int = budget) -> Simulation:
            return simulate(of, arrivals, budget, POLICIES[policy], demands)

        def best_of_streams(merged: bool, budget: int = budget, play_policy: Any = play_policy) -> Row:
            return best_streamed(
                lambda *how: stream_costs(costs[merged], demands, budget, layers[merged], *how), play_policy
            )

        alone, copied = costs_to_swap(costs[False], bundles[False], budget)
        merged, copied_merged = costs_to_swap(costs[True], bundles[True], budget)
        arms = {
            SWAPPED: best((policy, frames_and_bytes(play_policy(alone, policy), copied)) for policy in (APART, OURS)),
            STREAMED: best_of_streams(False),
            MERGED: best(
                [
                    ("swapped", frames_and_bytes(play_policy(merged, OURS), copied_merged)),
                    ("streamed", best_of_streams(True)),
                ]
            ),
        }
        rows.append({
            "workload": workload, "device": device, "share": share, "memory_bytes": budget,
            "received": sum(map(len, arrivals.values())), "saved": 1 - whole[1] / whole[0], "arms": arms,
            "for_all": max(everything.values()),
        })  # fmt: skip
    return rows


def best_rival(row: Row) -> int:
    """Frames in time of the better rival."""
    return max(row["arms"][arm]["in_time"] for arm in (SWAPPED, STREAMED))


def ratio(row: Row) -> float:
    """Merged over the best rival; 1 where neither brings any frame."""
    rival, merged = best_rival(row), row["arms"][MERGED]["in_time"]
    return merged / rival if rival else float("inf") if merged else 1.0


def table(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each budget and sharing of the catalogue, and for all."""
    found = []
    for share in SHARES:
        for sharing in ("high", "medium", "low", "all"):
            chosen = [
                row for row in rows
                if row["share"] == share and (sharing == "all" or row["workload"].startswith(sharing))
            ]  # fmt: skip
            if chosen:
                found.append((f"{100 * share:g} %", sharing, *sum_rows(chosen)))
    return found


def left_to_gain(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of LEFT_HEADS for each budget: how little the rivals leave to gain, and what merging makes of the rest."""
    found = []
    for share in SHARES:
        chosen = [row for row in rows if row["share"] == share]
        rest = [row for row in chosen if best_rival(row) < ENOUGH * row["for_all"]]
        merged = sum(row["arms"][MERGED]["in_time"] for row in rest)
        shown = (sum(map(best_rival, rest)), merged, sum(row["for_all"] for row in rest))
        largest = max(chosen, key=lambda row: (ratio(row), row["workload"]))
        where = f"{ratio(largest):.2f} ({largest['workload']}, {largest['device']})"
        found.append((f"{100 * share:g} %", f"{len(chosen) - len(rest)} of {len(chosen)}", *shown, where))
    return found


def by_device(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """The same for each device, at each budget."""
    return [
        (f"{100 * share:g} %", device, *sum_rows(chosen))
        for share in SHARES
        for device in dict.fromkeys(row["device"] for row in rows)
        if (chosen := [row for row in rows if (row["share"], row["device"]) == (share, device)])
    ]


def sum_rows(rows: Sequence[Row]) -> tuple[Any, ...]:
    frames = {arm: sum(row["arms"][arm]["in_time"] for row in rows) for arm in ARMS}
    ratios = [ratio(row) for row in rows]
    rival = sum(map(best_rival, rows))
    moved = [sum(row["arms"][arm]["moved"] for row in rows) / max(1, frames[arm]) / 1e6 for arm in ARMS]
    ages = [_median([row["arms"][arm]["age_p95_ms"] for row in rows]) for arm in ARMS]
    return (
        len(rows), sum(row["received"] for row in rows), *frames.values(), sum(row["for_all"] for row in rows),
        f"{frames[MERGED] / max(1, rival):.2f}",
        sum(one >= 2 for one in ratios), sum(one > 1 for one in ratios), sum(one < 1 for one in ratios),
        " / ".join(str(sum(row["arms"][arm]["by_query"].count(0) for row in rows)) for arm in ARMS),
        " / ".join(f"{one:.1f}" for one in moved), " / ".join(ages),
    )  # fmt: skip


def _median(ages: Sequence[float | None]) -> str:
    known = sorted(age for age in ages if age is not None)
    return f"{known[len(known) // 2]:.0f}" if known else "-"


def main(arguments: list[str] | None = None) -> int:
    """The command; 130 where it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to keep what was played")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each play; 30 unless given")
    parser.add_argument("--workers", type=int, help="processes; one for each core unless given")
    given = parser.parse_args(arguments)
    units = [(path.stem, device, f"{given.seconds:g}") for path in catalogue() for device in PROFILES]
    try:
        rows = play(units, rows_of, {"code": code_of(__file__), "seconds": given.seconds}, given.json, given.workers)
    except KeyboardInterrupt:
        print(f"interrupted: {given.json} has what was played; the same command goes on", file=sys.stderr)
        return 130
    print("\n\n".join([markdown(HEADS, table(rows)), markdown(DEVICE_HEADS, by_device(rows))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
