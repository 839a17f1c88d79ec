"""The reference: the schedule against which `ours` is measured, and which it follows until a free choice is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Demand, Plan, Policy, Situation


@dataclass(frozen=True, eq=False)
class Reference:
    """A policy and its plan, as one way of deciding over the same costs as `ours`, and what the queries ask for."""

    policy: Policy
    plan: Plan
    demands: Mapping[str, Demand]

    def decide(self, situation: Situation, costs: Costs) -> Decision:
        """Its next step; `situation.recall` is its own."""
        return self.policy.decide(situation, costs, self.plan)
