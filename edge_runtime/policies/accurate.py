"""`ours` where accuracy over time is the objective: no query below its original, and more for who gains most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_runtime.policies.against.originals import Originals, Pace
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.obliged import Obliged
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.order import least_moving_order
from edge_runtime.schedule.values import Decision, Demand, Plan, Situation


@dataclass(frozen=True, slots=True)
class Pledge:
    """What is settled beforehand: how the originals' box decides, the demands, and the queries that do not fit."""

    pace: Pace
    demands: Mapping[str, Demand]
    unfit: frozenset[str]


@dataclass(frozen=True, slots=True)
class Account:
    """What is recalled: the originals' box, and the frame of each query's newest answer here (captured_at)."""

    originals: Originals
    answered: Mapping[str, float] = field(default_factory=dict)


def planned(costs: Costs, demands: Mapping[str, Demand], unfit: frozenset[str], budget_bytes: int) -> Plan:
    """The plan; `costs` are over pieces."""
    pledge = Pledge(Pace(costs, demands, budget_bytes), demands, unfit)
    return Plan(least_moving_order(costs, budget_bytes), dict.fromkeys(costs.queries, 1), budget_bytes, pledge)


def decided(situation: Situation, costs: Costs, plan: Plan) -> Decision:
    """The next step: what is owed by when it is due, and before that whatever gains most (`Obliged`).

    No query's newest answer is to be older than its original's would be under time-sharing in the same memory, as far
    as frames come when they are expected and take what they cost. The originals' box runs along in thought; each answer
    there is due here when it is there, and takes no longer: what is in memory there stays in memory here, what is
    shared is copied once, and one frame is run, the newest, where there a batch is.
    """
    account: Account = situation.recall or Account(Originals(VirtualBox(situation.now)))
    originals = account.originals.until(situation.now, situation.waiting, costs, plan.detail.pace)
    decision = Obliged(situation, costs, plan, originals, account.answered).decision()
    answered = account.answered
    if decision.turn is not None and decision.count:
        answered = {**answered, decision.turn: situation.waiting[decision.turn][-1]}
    return replace(decision, recall=Account(originals, answered))
