"""The reference: the schedule against which `ours` is measured, and which it follows until a free choice is better."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Plan, Policy, Situation


@dataclass(frozen=True, eq=False)
class Reference:
    """A policy and its plan, as one way of deciding over the same costs as `ours`."""

    policy: Policy
    plan: Plan

    def decide(self, situation: Situation, costs: Costs) -> Decision:
        """Its next step; `situation.recall` is its own."""
        return self.policy.decide(situation, costs, self.plan)
