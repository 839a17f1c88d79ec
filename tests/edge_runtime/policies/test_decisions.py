"""Every decision of every policy over recorded costs and arrivals, as a hash: what was refactored decides as before.

`decisions.json` holds, as the first line of a trace does, the costs and demands of four workloads of the catalogue,
merged at the ceiling on modelled devices, and what came of each case. When a policy changes on purpose, record anew and
say in the commit what changed:

    python -m tests.edge_runtime.policies.test_decisions
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import Decision, Plan, Policy, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs, memory_settings
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.edge_runtime.simulation.trace import TRACE_FORMAT, TraceHeader, trace_costs

FILE = Path(__file__).with_name("decisions.json")
SECONDS = 16
# Too little for the largest query, enough for it alone, and half of the way to all.
BUDGETS = ("0.8 min", "min", "50%")


class Noted:
    """A policy whose decisions are noted."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name = policy, policy.name
        self.decisions: list[Decision] = []

    def view(self, costs: Costs) -> Costs:
        return self._policy.view(costs)

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return self._policy.plan(costs, specs, budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.decisions.append(self._policy.decide(state, costs, plan))
        return self.decisions[-1]


def cases() -> Iterator[tuple[str, str, str]]:
    yield from product(json.loads(FILE.read_text())["workloads"], BUDGETS, POLICIES)


def find_outcome(workload: str, budget: str, policy: str) -> dict[str, Any]:
    """What a policy decides on frames at each query's rate, whose phases follow from its place in the list."""
    head = json.loads(FILE.read_text())["workloads"][workload]
    queries = {query: {**one, "best_s": None} for query, one in head["queries"].items()}
    started = {"trace": TRACE_FORMAT, "policy": policy, "budget_bytes": 0, "resident": []}
    costs = trace_costs(TraceHeader.model_validate({**head, **started, "queries": queries}))
    settings = memory_settings(costs)
    budgets = {**settings, "0.8 min": settings["min"] * 8 // 10}
    demands = {query: QuerySpec(**demand) for query, demand in head["demands"].items()}
    arrivals = {
        query: [(index * 0.37 % 1 + frame) / demand.fps for frame in range(int(SECONDS * demand.fps))]
        for index, (query, demand) in enumerate(demands.items())
    }
    noted = Noted(POLICIES[policy])
    played = simulate(costs, arrivals, budgets[budget], noted, demands)
    texts = [
        repr((one.query, one.count, one.evict, one.load, drop, one.wake_s and round(one.wake_s, 6)))
        for one in noted.decisions
        for drop in [[(query, round(captured_at, 6), reason) for query, captured_at, reason in one.drop]]
    ]
    return {
        "decisions": len(texts),
        "processed": sum(row["processed"] for row in played.per_query()),
        "bytes_moved": played.bytes_moved,
        "sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
    }


@pytest.mark.parametrize(("workload", "budget", "policy"), list(cases()))
def test_decide_recorded_cases_gives_the_recorded_decisions(workload, budget, policy):
    recorded = json.loads(FILE.read_text())["decisions"][f"{workload}, {budget}, {policy}"]
    assert find_outcome(workload, budget, policy) == recorded


def record() -> None:
    """Write down what the policies decide now."""
    document = json.loads(FILE.read_text())
    document["decisions"] = {", ".join(case): find_outcome(*case) for case in cases()}
    parts = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(one, separators=(',', ':'))}" for key, one in held.items())
        + "\n}"
        for part, held in document.items()
    ]
    FILE.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    record()
