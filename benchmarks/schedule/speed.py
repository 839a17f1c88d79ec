"""Seconds to plan few and many queries, and CPU time of a decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.schedule.cases import ORDER, arrivals_of, case_of, catalogue
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost, coalesce_tensors, memory_settings
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.edge_runtime.simulation.simulator import simulate

PLANNED = (15, 1000)
DEVICE = "orin-nano-8gb"

Row = dict[str, Any]


def planning_rows(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Queries, memory, and the seconds of each policy of ORDER."""
    at = {(row["queries"], row["memory"], row["policy"]): row["seconds"] for row in found}
    places = dict.fromkeys((row["queries"], row["memory"]) for row in found)
    return [(f"{count:,}", memory, *(f"{at[count, memory, name]:.2f} s" for name in ORDER)) for count, memory in places]


def deciding_rows(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Queries, memory, and the microseconds of a decision of each policy of ORDER: median / 99th percentile."""
    at = {(row["queries"], row["memory"], row["policy"]): row for row in found}
    places = dict.fromkeys((row["queries"], row["memory"]) for row in found)
    return [
        (str(count), memory, *(f"{at[count, memory, name]['median_us']:.0f} / {at[count, memory, name]['p99_us']:.0f}"
                               for name in ORDER))
        for count, memory in places
    ]  # fmt: skip


def many(count: int, device: str = DEVICE) -> tuple[Costs, Costs, dict[str, QuerySpec]]:
    """So many queries, the catalogue's over and over: each has private tensors of its own and shares what it shared.

    The originals' costs, the merged ones, and what the queries ask for.
    """
    pool = [(case, query) for case in (case_of(path, device) for path in catalogue()) for query in case.demands]
    chosen = [
        (f"{index}-{query}", case, query)
        for index, (case, query) in ((index, pool[index % len(pool)]) for index in range(count))
    ]
    users = {
        id(costs): Counter(name for cost in costs.queries.values() for name in cost.needed)
        for case, _ in pool
        for costs in (case.apart, case.shared)
    }
    found: list[tuple[dict[str, QueryCost], dict[str, int]]] = []
    for apart in (True, False):
        queries: dict[str, QueryCost] = {}
        sizes: dict[str, int] = {}
        for index, (name_of, case, query) in enumerate(chosen):
            costs = case.apart if apart else case.shared
            cost = costs.queries[query]
            named = {
                name: f"{case.workload}/{name}" if users[id(costs)][name] > 1 else f"{index}/{name}"
                for name in cost.tensors
            }
            sizes |= {named[name]: costs.tensor_bytes[name] for name in cost.tensors}
            queries[name_of] = replace(cost, tensors=tuple(named.values()))
        found.append((queries, sizes))
    profile = PROFILES[device]
    apart_costs, shared_costs = (
        Costs(queries, sizes, profile.copy_bytes_per_s, profile.load_latency_s) for queries, sizes in found
    )
    return apart_costs, shared_costs, {name: case.demands[query] for name, case, query in chosen}


def planning() -> list[Row]:
    """Seconds to plan, all tensors given one by one; what the policy makes of the costs first counts too."""
    rows = []
    for count in PLANNED:
        apart_costs, shared, demands = many(count)
        for setting in ("min", "50%"):
            budget = memory_settings(apart_costs)[setting]
            for name in ORDER:
                start = time.perf_counter()
                costs = POLICIES[name].view(shared)
                POLICIES[name].plan(costs, demands, budget)
                rows.append({
                    "queries": count, "tensors": len(costs.tensor_bytes), "memory": setting, "policy": name,
                    "seconds": round(time.perf_counter() - start, 3),
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


class _Timed:
    """A policy that notes the CPU time of each decision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self._policy = POLICIES[name]

    def view(self, costs: Costs) -> Costs:
        return self._policy.view(costs)

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return self._policy.plan(costs, specs, budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        start = time.thread_time()
        decision = self._policy.decide(state, costs, plan)
        self.seconds.append(time.thread_time() - start)
        return decision


def deciding(seconds: float) -> list[Row]:
    """Microseconds of CPU of each decision for PLANNED[0] queries over groups of tensors, as on the box."""
    rows = []
    apart_costs, shared, demands = many(PLANNED[0])
    costs, arrivals = coalesce_tensors(shared), arrivals_of(demands, seconds, 0)
    for setting in ("min", "75%"):
        for name in ORDER:
            timed = _Timed(name)
            simulate(costs, arrivals, memory_settings(apart_costs)[setting], timed, demands)
            spent = sorted(1e6 * one for one in timed.seconds)
            rows.append({
                "queries": PLANNED[0], "memory": setting, "policy": name, "decisions": len(spent),
                "median_us": round(median(spent), 1), "p99_us": round(spent[int(0.99 * len(spent))], 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows
