"""Frames in time by each schedule, over the catalogue's workloads, device profiles and memory settings.

Usage: python benchmarks/schedule.py [frames|planning|overhead ...] [--seeds N] [--seconds S] [--json FILE]

frames: every workload of benchmarks/workloads but the two real ones, merged at the ceiling (each group of layers shares
one weight) on three modelled device profiles at min, 50 % and 75 % of what the originals need. `time-sharing`, `gemel`
and `ours` get the same frames: each query's rate, phases drawn from the seed, the box empty at the start. The bound of
schedule_bound.py stands beside. A query's worst ratio is that of its frames in time under `ours` to those under
`gemel`, summed over seeds. planning: seconds to plan 15 and 1,000 queries made of the catalogue's. overhead: processor
time spent in `decide` per frame received.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from machine import machine
from schedule_bound import upper_bound

from edge_runtime.costs import Costs, QueryCost
from edge_runtime.pieces import condensed
from edge_runtime.policies import POLICIES
from edge_runtime.profiles import PROFILES
from edge_runtime.schedule import Decision, Demand, Plan, Situation
from edge_runtime.settings import memory_settings
from edge_runtime.simulator import simulate
from gemel.on_paper import DEFAULT_FPS, costs_apart, costs_shared
from gemel.text import table
from models.workload import load_workload

WORKLOADS = Path(__file__).parent / "workloads"
REAL = ("cifar", "gti", "junction")
DEVICES = ("jetson-nano", "orin-nano-8gb", "xavier-nx")
SETTINGS = ("min", "50%", "75%")
ORDER = ("time-sharing", "gemel", "ours")
PLANNED = (15, 1000)


@dataclass(frozen=True)
class Case:
    """A workload on a device: costs of the originals and of the merged models, and what its queries ask for."""

    workload: str
    device: str
    apart: Costs
    shared: Costs
    demands: Mapping[str, Demand]


def cases(devices: Iterable[str] = DEVICES) -> Iterable[Case]:
    """Every workload of the catalogue on every device."""
    for path in sorted(WORKLOADS.glob("*.yaml")):
        if path.stem in REAL:
            continue
        load = load_workload(path)
        demands = {query.id: Demand(query.fps or DEFAULT_FPS, float(query.priority)) for query in load.queries}
        for device in devices:
            profile = PROFILES[device]
            yield Case(path.stem, device, costs_apart(profile, load.queries), costs_shared(profile, load.queries),
                       demands)


def arrivals_of(demands: Mapping[str, Demand], seconds: float, seed: int) -> dict[str, list[float]]:
    import random

    rng = random.Random(seed)
    return {query: [(phase + index) / demand.fps for index in range(int(seconds * demand.fps))]
            for query, demand in demands.items() for phase in [rng.random()]}


def frames(seconds: float, seeds: int) -> list[dict[str, Any]]:
    """One row per workload, device and memory setting."""
    rows = []
    for case in cases():
        shared = condensed(case.shared)
        for setting in SETTINGS:
            budget = memory_settings(case.apart)[setting]
            in_time: dict[str, dict[str, int]] = {name: dict.fromkeys(case.demands, 0) for name in ORDER}
            moved = dict.fromkeys(ORDER, 0)
            bound = 0.0
            for seed in range(seeds):
                arrivals = arrivals_of(case.demands, seconds, seed)
                bound += upper_bound(shared, arrivals, {q: d.fps for q, d in case.demands.items()}, budget)
                for name in ORDER:
                    played = simulate(shared, arrivals, budget, POLICIES[name], case.demands)
                    moved[name] += played.bytes_moved
                    for row in played.per_query():
                        in_time[name][row["id"]] += row["processed"] - row["late"]
            paper = in_time["gemel"]
            ratios = {query: in_time["ours"][query] / count for query, count in paper.items() if count}
            worst = min(ratios, key=ratios.__getitem__) if ratios else None
            rows.append({
                "workload": case.workload, "device": case.device, "memory": setting, "memory_bytes": budget,
                "received": sum(int(seconds * demand.fps) for demand in case.demands.values()) * seeds,
                **{name: sum(in_time[name].values()) for name in ORDER}, "bound": bound, "moved": moved,
                "worst_query": worst, "worst_ratio": ratios[worst] if worst else None,
                "worst_of_gemel": paper[worst] if worst else 0, "queries": in_time,
            })  # fmt: skip
            print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Mapping[str, Any]) -> str:
    worst = "-" if row["worst_ratio"] is None else f"{row['worst_ratio']:.2f} ({row['worst_query']})"
    counts = "  ".join(f"{name} {row[name]}" for name in ORDER)
    return f"{row['workload']} {row['device']} {row['memory']}: {counts}  bound {row['bound']:.0f}  worst {worst}"


def summary(rows: list[dict[str, Any]]) -> str:
    """The tables of docs/schedule.md."""
    parts = []
    sums = []
    for setting in SETTINGS:
        chosen = [row for row in rows if row["memory"] == setting]
        total = {key: sum(row[key] for row in chosen) for key in ("received", *ORDER, "bound")}
        more = sum(row["ours"] > row["gemel"] for row in chosen)
        fewer = sum(row["ours"] < row["gemel"] for row in chosen)
        below = sum(row["worst_ratio"] is not None and row["worst_ratio"] < 0.8 for row in chosen)
        sums.append((setting, total["received"], *(total[name] for name in ORDER), round(total["bound"]),
                     f"{total['ours'] / total['gemel']:.3f}", f"{total['ours'] / total['time-sharing']:.3f}",
                     f"{total['ours'] / total['bound']:.3f}", f"{more}/{len(chosen)}", fewer, below))  # fmt: skip
    parts.append(_markdown(("memory", "received", *ORDER, "bound", "ours/gemel", "ours/time-sharing", "ours/bound",
                            "cells with more", "with fewer", "with a query < 0.8"), sums))  # fmt: skip
    for setting in SETTINGS:
        lines = []
        for row in (row for row in rows if row["memory"] == setting):
            worst = "-" if row["worst_ratio"] is None else f"{row['worst_ratio']:.2f}"
            lines.append((row["workload"], row["device"], row["received"], *(row[name] for name in ORDER),
                          round(row["bound"]), f"{row['ours'] / max(1, row['gemel']):.3f}",
                          f"{row['ours'] / max(1, row['bound']):.2f}", worst, row["worst_query"] or "-",
                          row["worst_of_gemel"]))  # fmt: skip
        parts.append(f"### {setting}\n\n" + _markdown(
            ("workload", "device", "received", *ORDER, "bound", "ours/gemel", "ours/bound", "worst query", "which",
             "gemel gave it"), lines))  # fmt: skip
    return "\n\n".join(parts)


def _markdown(headers: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(headers) + " |", "| " + " | ".join("---" for _ in headers) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def many(count: int, device: str = "orin-nano-8gb") -> tuple[Costs, Costs, dict[str, Demand]]:
    """So many queries, the catalogue's over and over: each has private tensors of its own and shares what it shared.

    The originals' costs, the merged ones, and what the queries ask for.
    """
    pool = [(case, query) for case in cases([device]) for query in case.demands]
    found: list[tuple[dict[str, QueryCost], dict[str, int]]] = []
    for apart in (True, False):
        queries: dict[str, QueryCost] = {}
        sizes: dict[str, int] = {}
        for index in range(count):
            case, query = pool[index % len(pool)]
            costs = case.apart if apart else case.shared
            cost = costs.queries[query]
            users = {name: sum(name in other.needed for other in costs.queries.values()) for name in cost.needed}
            named = {name: f"{case.workload}/{name}" if users[name] > 1 else f"{index}/{name}" for name in cost.tensors}
            sizes |= {named[name]: costs.tensor_bytes[name] for name in cost.tensors}
            queries[f"{index}-{query}"] = QueryCost(tuple(named.values()), cost.run_s, cost.workspace_bytes,
                                                    cost.sla_s, cost.larger)
        found.append((queries, sizes))
    profile = PROFILES[device]
    apart_costs, shared_costs = (Costs(queries, sizes, profile.copy_bytes_per_s, profile.load_latency_s)
                                 for queries, sizes in found)
    demands = {f"{index}-{pool[index % len(pool)][1]}": pool[index % len(pool)][0].demands[pool[index % len(pool)][1]]
               for index in range(count)}
    return apart_costs, shared_costs, demands


def planning() -> list[dict[str, Any]]:
    """Seconds to plan, all tensors given one by one as a box does."""
    rows = []
    for count in PLANNED:
        apart_costs, shared, demands = many(count)
        for setting in ("min", "50%"):
            budget = memory_settings(apart_costs)[setting]
            for name in ORDER:
                costs = POLICIES[name].view(shared)
                start = time.perf_counter()
                POLICIES[name].plan(costs, demands, budget)
                rows.append({"queries": count, "tensors": len(costs.tensor_bytes), "memory": setting, "policy": name,
                             "seconds": time.perf_counter() - start})  # fmt: skip
                print(rows[-1], flush=True)
    return rows


class _Timed:
    """A policy that adds up the time its decisions take."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.decisions = name, 0.0, 0
        self._policy = POLICIES[name]

    def view(self, costs: Costs) -> Costs:
        return self._policy.view(costs)

    def plan(self, costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> Plan:
        return self._policy.plan(costs, demands, budget_bytes)

    def decide(self, situation: Situation, costs: Costs, plan: Plan) -> Decision:
        start = time.thread_time()
        decision = self._policy.decide(situation, costs, plan)
        self.seconds += time.thread_time() - start
        self.decisions += 1
        return decision


def overhead(seconds: float) -> list[dict[str, Any]]:
    """Microseconds in `decide` per frame received, over pieces of tensors as on the box."""
    rows = []
    for case in cases(["orin-nano-8gb"]):
        for setting in ("min", "75%"):
            budget = memory_settings(case.apart)[setting]
            for name in ORDER:
                timed = _Timed(name)
                arrivals = arrivals_of(case.demands, seconds, 0)
                simulate(condensed(case.shared), arrivals, budget, timed, case.demands)
                received = sum(map(len, arrivals.values()))
                rows.append({"workload": case.workload, "queries": len(case.demands), "memory": setting,
                             "policy": name, "us_per_frame": 1e6 * timed.seconds / received,
                             "us_per_decision": 1e6 * timed.seconds / max(1, timed.decisions)})  # fmt: skip
    print(table(tuple(rows[0]), [tuple(f"{value:.0f}" if isinstance(value, float) else value for value in row.values())
                                 for row in rows]))  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", help="frames, planning, overhead (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = args.parts or ["planning", "overhead", "frames"]
    found: dict[str, Any] = {"machine": machine(), "date": date.today().isoformat()}
    if "planning" in parts:
        found["planning"] = planning()
    if "overhead" in parts:
        found["overhead"] = overhead(args.seconds)
    if "frames" in parts:
        found["frames"] = frames(args.seconds, args.seeds)
        print(summary(found["frames"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
