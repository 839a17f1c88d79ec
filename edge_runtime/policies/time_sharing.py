"""`time-sharing`: queries take turns with whole models, as a box does that knows nothing of merging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.batches import worst_first_batches
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors, unshared_costs
from gemel.edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState


@dataclass(frozen=True, slots=True)
class TimeSharingPolicy:
    """Queries take turns with whole models, as a box does that knows nothing of merging.

    Turns in the order listed; tensors of different queries never count as shared, and are kept once for each.

    The paper's baseline (section 2.2): batch sizes and eviction as in `gemel`, so that only the knowledge of merging
    makes the difference.
    """

    name: str = field(default="time-sharing", init=False)

    def view(self, costs: Costs) -> Costs:
        return unshared_costs(costs)

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        order = tuple(costs.queries)
        return Plan(order, worst_first_batches(coalesce_tensors(costs), specs, order, budget_bytes), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        return GemelPolicy().decide(state, costs, plan)
