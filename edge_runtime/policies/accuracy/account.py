"""The account: what the originals' box knows by now, what is known here, and the two ways to go on from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edge_runtime.policies.accuracy.obliged import Obliged
from edge_runtime.policies.against.originals import Originals, Pace
from edge_runtime.policies.gemel import GemelPolicy
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState

PAPER = GemelPolicy()


@dataclass(frozen=True, slots=True)
class Pledge:
    """What is settled beforehand: how the originals' box decides, the demands, the queries that do not fit, and the
    paper's plan.
    """

    pace: Pace
    demands: Mapping[str, QuerySpec]
    unfit: frozenset[str]
    paper: Plan


@dataclass(frozen=True, slots=True)
class Account:
    """The originals' box, and the frame of each query's newest answer here (captured_at)."""

    originals: Originals
    answered: Mapping[str, float] = field(default_factory=dict)

    def until(self, state: SchedulerState, costs: Costs, plan: Plan) -> Account:
        """The account at this moment."""
        originals = self.originals.until(state.now, state.waiting, costs, plan.detail.pace)
        return replace(self, originals=originals)

    def owed(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        """What is owed by when it is due, and before that whatever gains most."""
        return Obliged(state, costs, plan, self.originals, self.answered).decision()

    def after(self, decision: Decision, state: SchedulerState) -> Account:
        """The account once a decision has been carried out."""
        query = decision.query
        if query is None or not decision.count:
            return self
        dropped = {captured_at for name, captured_at, _ in decision.drop if name == query}
        left = [captured_at for captured_at in state.waiting[query] if captured_at not in dropped]
        return replace(self, answered={**self.answered, query: left[decision.count - 1]})


def by_turns(state: SchedulerState, costs: Costs, plan: Plan, turns: Any) -> Decision:
    """The paper's next step, which recalls `turns`."""
    return PAPER.decide(replace(state, policy_state=turns), costs, plan.detail.paper)
