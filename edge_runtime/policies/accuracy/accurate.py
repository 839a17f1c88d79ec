"""`adaptive` where accuracy over time is the objective: no query below its original, and more for who gains most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edge_runtime.policies.accuracy.account import PAPER, Account, Pledge, by_turns
from edge_runtime.policies.accuracy.contest import Contest
from edge_runtime.policies.against.originals import Originals, Pace
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.trying import AGAIN_S, BROKEN_TIMES, STEPS, changed, first_trial, longer, verdict
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.order import least_moving_order
from edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState, accuracy_at

# Where the paper's turns are taken, what a query may have lost against its original since: accuracy times seconds, and
# as a part of the time.
LOST_S, LOST_SHARE = 0.15, 0.001


@dataclass(frozen=True, slots=True)
class Course:
    """What is recalled: the account, and by what it goes.

    The paper's schedule, which recalls `turns`, is followed where `passed` holds the contest that it won; what is owed
    is done everywhere else. `contest` is at work since so many `steps`, or begins at `try_at`, or, where a query lost
    too much by the turns, as soon as it has that back (`owes`). `lost` is what each query has had less than its
    original since the turns were taken, up to `seen_at`, and `there` the frame of the newest answer that its original
    then had.
    """

    account: Account
    try_at: float
    wait_s: float = AGAIN_S
    contest: Contest | None = None
    steps: int = 0
    passed: Contest | None = None
    owes: bool = False
    turns: Any = None
    seen_at: float = 0.0
    lost: Mapping[str, float] = field(default_factory=dict)
    there: Mapping[str, float] = field(default_factory=dict)

    def barred(self, now: float, times: float = 1.0) -> Course:
        """The course without the paper's schedule, until another contest."""
        return replace(
            self, passed=None, contest=None, owes=False, try_at=now + times * self.wait_s, wait_s=longer(self.wait_s),
        )  # fmt: skip


def planned(costs: Costs, demands: Mapping[str, QuerySpec], unfit: frozenset[str], budget_bytes: int) -> Plan:
    """The plan; `costs` are over pieces."""
    paper = PAPER.plan(costs, demands, budget_bytes)
    pledge = Pledge(Pace(costs, demands, budget_bytes), demands, unfit, paper)
    return Plan(least_moving_order(costs, budget_bytes), dict.fromkeys(costs.queries, 1), budget_bytes, pledge)


def decided(state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
    """The next step: what is owed by when it is due, and before that whatever gains most (`Obliged`); or the paper's.

    No query's newest answer is to be older than its original's would be under time-sharing in the same memory, as far
    as frames come when they are expected and take what they cost. The originals' box runs along in thought; each answer
    there is due here when it is there, and takes no longer: what is in memory there stays in memory here, what is
    shared is copied once, and one frame is run, the newest, where there a batch is.

    Where memory is so short that this binds, the paper's turns may bring more and still leave no query with less than
    its original had, if not at every moment. That is rehearsed (`Contest`); where it is so the turns are taken, for as
    long as no query loses.
    """
    demands = plan.detail.demands
    course = state.policy_state or _begun(state.now, demands)
    account = course.account.until(state, costs, plan)
    course = _tried(_seen(replace(course, account=account), state.now, demands), state, costs, plan)
    if course.passed is None:
        decision, turns = account.owed(state, costs, plan), None
    else:
        decision = by_turns(state, costs, plan, course.turns)
        turns = decision.policy_state
    return replace(decision, policy_state=replace(course, account=account.after(decision, state), turns=turns))


def _begun(now: float, demands: Mapping[str, QuerySpec]) -> Course:
    return Course(Account(Originals(VirtualBox(now))), first_trial(now, demands))


def _seen(course: Course, now: float, demands: Mapping[str, QuerySpec]) -> Course:
    """The course once it is counted what the queries have lost against their originals since turns were taken."""
    if course.passed is None and not course.owes:
        return course
    lost, there, took_s = dict(course.lost), dict(course.there), now - course.seen_at
    for query, answer in course.account.originals.answers.items():
        if answer.finishes <= now:
            there[query] = answer.captured
        demand, mine = demands[query], course.account.answered.get(query, -math.inf)
        if demand.staleness and query in there:
            theirs, ours = (_worth(demand, now - captured) for captured in (there[query], mine))
            lost[query] = lost.get(query, 0.0) + took_s * (theirs - ours)
    return replace(course, lost=lost, there=there, seen_at=now)


def _worth(demand: QuerySpec, age_s: float) -> float:
    return accuracy_at(demand.staleness, age_s * demand.fps) if age_s < math.inf else 0.0


def _tried(course: Course, state: SchedulerState, costs: Costs, plan: Plan) -> Course:
    """The course once it has been looked whether a query has lost too much, and a contest that is due has begun."""
    now, most_lost = state.now, max(course.lost.values(), default=0.0)
    if course.passed is not None:
        starved = course.account.originals.answers.keys() - course.account.answered.keys()
        if starved or most_lost > LOST_S + LOST_SHARE * (now - course.passed.begins):
            return replace(course.barred(now, BROKEN_TIMES), owes=True)
        return replace(course, passed=None, try_at=now) if changed(course.passed.costs, costs) else course
    if course.contest is None:
        due = now >= course.try_at or (course.owes and most_lost <= 0)
        return replace(course, contest=Contest(state, course.account, costs, plan), steps=0) if due else course
    steps = course.steps + STEPS
    passed = verdict(course.contest, steps, now)
    if passed is None:
        return replace(course, steps=steps)
    if not passed:
        return course.barred(now)
    return replace(
        course, passed=course.contest, contest=None, owes=False, turns=None, seen_at=now, lost={}, there={}
    )  # fmt: skip
