"""The reference: the schedule against which `adaptive` is measured, and which it follows until that is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, Plan, Policy, QuerySpec, SchedulerState


@dataclass(frozen=True, eq=False)
class Reference:
    """A policy and its plan, as one way of deciding over the same costs as `adaptive`, and what the queries ask for."""

    policy: Policy
    plan: Plan
    demands: Mapping[str, QuerySpec]

    def decide(self, state: SchedulerState, costs: Costs) -> Decision:
        """Its next step; `situation.recall` is its own."""
        return self.policy.decide(state, costs, self.plan)
