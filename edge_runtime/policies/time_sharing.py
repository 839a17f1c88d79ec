"""`time-sharing`: queries take turns with whole models, as a box does that knows nothing of merging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_runtime.policies.paper import Paper
from edge_runtime.schedule.batches import worst_first_batches
from edge_runtime.schedule.costs import Costs, apart
from edge_runtime.schedule.pieces import condensed
from edge_runtime.schedule.values import Decision, Demand, Plan, Situation


@dataclass(frozen=True, slots=True)
class TimeSharing:
    """Turns in the order listed; tensors of different queries never count as shared, and are kept once for each.

    The paper's baseline (section 2.2): batch sizes and eviction as in `gemel`, so that only the knowledge of merging
    makes the difference.
    """

    name: str = "time-sharing"

    def view(self, costs: Costs) -> Costs:
        return apart(costs)

    def plan(self, costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> Plan:
        order = tuple(costs.queries)
        return Plan(order, worst_first_batches(condensed(costs), demands, order, budget_bytes), budget_bytes)

    def decide(self, situation: Situation, costs: Costs, plan: Plan) -> Decision:
        return Paper().decide(situation, costs, plan)
