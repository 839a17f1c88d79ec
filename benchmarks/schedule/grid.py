"""The grid: what each arm brings over memory, frame rate and SLA, on every workload of the catalogue, or each real one.

Usage: python -m benchmarks.schedule.grid --json FILE [--real] [--device D] [--seconds S] [--workers N]

Fifteen workloads, each query at 5, 10 and 30 frames a second with an SLA of 50, 100 and 200 ms, in the memory settings
min, 50 %, 75 % and all of the originals. Arms, all on the virtual clock: the originals under the paper's time-sharing,
under our schedule (so is `joint`, which shares nothing either), streamed layer by layer, and stored in 4 bits; merged
at the ceiling under the paper's schedule, under ours, and stored in 4 bits. What retraining and fewer bits do to
answers is no part of this (docs/merging.md); how old answers are is, by the recorded staleness curves. `adaptive`
aims at accuracy over time. Goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.schedule.cases import WORKLOADS, arrivals_of, catalogue, markdown, real
from benchmarks.schedule.objective import CURVES, accuracy_over_time, at_rate, curves
from benchmarks.schedule.playing import Row, code_of, play
from benchmarks.schedule.streamed import URGENT, WINDOWS, StreamedLayer, stream_costs, streamed_layers
from edge_runtime.policies import POLICIES
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import Costs, coalesce_tensors, memory_settings
from edge_runtime.scheduler.eviction import MIN_OVERFLOW_BYTES
from edge_runtime.simulation.device_profiles import PROFILES, costs_for
from edge_runtime.simulation.simulator import age_p95_ms, simulate
from gemel.analytic_costs import merge_at_ceiling, workload_originals
from models.errors import InputError
from models.workload import load_workload

MEMORY, FPS, SLAS_MS = ("min", "50%", "75%", "all"), (5, 10, 30), (50, 100, 200)
NARROW_BITS, FULL_BITS = 4, 32
APART, OWN, STREAMED, NARROW, PAPER, WIDE, BOTH = ARMS = (
    "none", "none, adaptive", "none, streamed", "none, 4 bits", "gemel", "top-down", "top-down, 4 bits",
)  # fmt: skip
POLICY = {APART: "time-sharing", PAPER: "gemel"}
HEADS = ("over all else", *ARMS)


def narrowed(costs: Costs, bits: int = NARROW_BITS) -> Costs:
    """The same models with their weights stored in so few bits; a layer's are widened in the workspace when it runs."""
    sizes = {
        name: nbytes * bits // FULL_BITS if nbytes >= MIN_OVERFLOW_BYTES else nbytes
        for name, nbytes in costs.tensor_bytes.items()
    }
    queries = {}
    for query, cost in costs.queries.items():
        # Wide, and a byte for each weight while it is unpacked.
        scratch = max(map(costs.tensor_bytes.__getitem__, cost.tensors)) * 5 // 4
        larger = tuple(replace(one, workspace_bytes=one.workspace_bytes + scratch) for one in cost.larger)
        queries[query] = replace(cost, workspace_bytes=cost.workspace_bytes + scratch, larger=larger)
    return Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s)


def within(costs: Costs, sla_ms: int) -> Costs:
    """The same costs with one SLA for all."""
    queries = {query: replace(cost, sla_s=sla_ms / 1000) for query, cost in costs.queries.items()}
    return Costs(queries, costs.tensor_bytes, costs.copy_bytes_per_s, costs.load_latency_s, costs.footprints)


def streamed(
    costs: Costs, demands: Mapping[str, QuerySpec], budget: int, layers: Mapping[str, Sequence[StreamedLayer]]
) -> Costs:
    """Streamed with the window and the choice of what stays under which runs take least time."""
    tried = (stream_costs(costs, demands, budget, layers, *how).costs for how in product(WINDOWS, URGENT))
    return min(tried, key=lambda one: sum(demand.fps * one.queries[query].run_s for query, demand in demands.items()))


def rows_of(workload: str, device: str, seconds: str) -> list[Row]:
    """A row for each memory, rate and SLA of one workload."""
    queries, profile = load_workload(WORKLOADS / f"{workload}.yaml").queries, PROFILES[device]
    alone, tasks = workload_originals(queries), {query.id: query.task for query in queries}
    whole, layers = costs_for(profile, alone), streamed_layers(profile, alone)
    own, shared = coalesce_tensors(whole), coalesce_tensors(costs_for(profile, merge_at_ceiling(queries)))
    costs = {APART: own, OWN: own, NARROW: narrowed(own), PAPER: shared, WIDE: shared, BOTH: narrowed(shared)}
    settings, rows = memory_settings(own), []
    for fps, memory in product(FPS, MEMORY):
        worth = {query: at_rate(curves()[task][1], curves()[task][0], fps) for query, task in tasks.items()}
        plain = {query: QuerySpec(fps) for query in tasks}
        aware = {query: QuerySpec(fps, staleness=worth[query]) for query in tasks}
        arrivals, kept = arrivals_of(plain, float(seconds), 0), streamed(whole, plain, settings[memory], layers)
        for sla_ms in SLAS_MS:
            arms = {}
            for arm in ARMS:
                policy = POLICIES[POLICY.get(arm, "adaptive")]
                asked = plain if arm in POLICY else aware
                played = simulate(
                    within({**costs, STREAMED: kept}[arm], sla_ms), arrivals, settings[memory], policy, asked
                )
                ages = [one.finished_at - one.captured_at for one in played.frames if one.finished_at is not None]
                accuracy = accuracy_over_time(played, plain, worth)
                arms[arm] = {
                    "in_time": sum(row["processed"] - row["late"] for row in played.per_query()),
                    "accuracy": round(sum(accuracy) / len(accuracy), 4), "worst": round(min(accuracy), 4),
                    "age_p95_ms": age_p95_ms(ages), "moved": played.bytes_moved,
                }  # fmt: skip
            received = sum(map(len, arrivals.values()))
            rows.append({
                "workload": workload, "device": device, "memory": memory, "fps": fps, "sla_ms": sla_ms,
                "received": received, "arms": arms,
            })  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each memory, rate and SLA: frames in time of 100, and accuracy over time."""
    chosen = [
        (f"{key.partition('_')[0]} {value}", [row for row in rows if row[key] == value])
        for key, values in (("memory", MEMORY), ("fps", FPS), ("sla_ms", SLAS_MS))
        for value in values
    ]
    return [(name, *(_cell(own, arm) for arm in ARMS)) for name, own in [*chosen, ("everything", list(rows))] if own]


def by_workload(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each workload in each memory setting."""
    chosen = {
        (name, memory): [row for row in rows if (row["workload"], row["memory"]) == (name, memory)]
        for name in dict.fromkeys(row["workload"] for row in rows)
        for memory in MEMORY
    }
    return [(f"{name}, {memory}", *(_cell(own, arm) for arm in ARMS)) for (name, memory), own in chosen.items() if own]


def _cell(rows: Sequence[Row], arm: str) -> str:
    shares = [row["arms"][arm]["in_time"] / row["received"] for row in rows]
    accuracy = [row["arms"][arm]["accuracy"] for row in rows]
    return f"{100 * sum(shares) / len(rows):.0f} / {sum(accuracy) / len(rows):.3f}"


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 for bad input, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to keep what was played")
    parser.add_argument("--device", choices=tuple(PROFILES), default="jetson-nano", help="jetson-nano unless given")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each play; 20 unless given")
    parser.add_argument("--workers", type=int, help="processes; one for each core unless given")
    parser.add_argument("--real", action="store_true", help="the workloads of real models, in place of the catalogue")
    given = parser.parse_args(arguments)
    paths = real() if given.real else catalogue()
    units = [(path.stem, given.device, f"{given.seconds:g}") for path in paths]
    asked = {"code": code_of(__file__, str(CURVES)), "seconds": given.seconds, "device": given.device}
    try:
        rows = play(units, rows_of, asked, given.json, given.workers)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {given.json} has what was played; the same command goes on", file=sys.stderr)
        return 130
    print(markdown(HEADS, by_workload(rows) if given.real else table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
