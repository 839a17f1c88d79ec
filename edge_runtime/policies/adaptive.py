"""`adaptive`: the most frames in time, never fewer than the paper's schedule would bring on the same frames.

Or, where that is the objective, the most accuracy over time, with no query below its original (`accurate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.policies.accuracy.accurate import decided, planned
from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.following import followed, rejoined, unseen
from edge_runtime.policies.free import freely
from edge_runtime.policies.gemel import GemelPolicy
from edge_runtime.policies.trial import Trial
from edge_runtime.policies.trying import AGAIN_S, BROKEN_TIMES, LEAD_S, STEPS, changed, first_trial, longer, verdict
from edge_runtime.scheduler.batches import largest_batches
from edge_runtime.scheduler.costs import Costs, coalesced
from edge_runtime.scheduler.order import least_moving_order
from edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState

PAPER = GemelPolicy()
# How long the way back to the shadow may take before the reference is followed from wherever the box is.
REJOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What `adaptive` settles beforehand: the reference, against which it is measured, and `unfit`, the queries that
    do not fit the budget even alone.
    """

    reference: Reference
    unfit: frozenset[str]

    @property
    def demands(self) -> Mapping[str, QuerySpec]:
        """What the queries ask for."""
        return self.reference.demands


@dataclass(frozen=True, slots=True)
class Course:
    """What `adaptive` recalls: the book, and by what it goes.

    It chooses freely where `passed` holds the trial that allows it; else it follows the reference, which recalls
    `turns`, or, up to `rejoin_by`, finds its way back to it. `trial` is at work since so many `steps`, or begins at
    `try_at`.
    """

    book: Book
    try_at: float
    wait_s: float = AGAIN_S
    turns: Any = None
    rejoin_by: float | None = None
    passed: Trial | None = None
    trial: Trial | None = None
    steps: int = 0

    def barred(self, now: float, times: float = 1.0) -> Course:
        """The course without the free choice, until another trial."""
        rejoin_by = self.rejoin_by if self.passed is None else now + REJOIN_S
        return replace(
            self, passed=None, trial=None, rejoin_by=rejoin_by, try_at=now + times * self.wait_s,
            wait_s=longer(self.wait_s),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """The paper's schedule to begin with, and the free choice (`freely`) where a trial shows that it brings more.

    Never fewer frames than the paper's, by construction: while the paper's decisions are followed from the start, what
    runs is what it would run. As soon as the rates and phases of the frames are known, the free choice is rehearsed
    from the present moment on (`Trial`), and taken only if it brings more in sum and enough of each query. From then on
    the book compares it with the paper's schedule on the same frames; where it falls behind further than the promise
    bears, the box goes back to where the paper's schedule would be by now (`rejoined`), and follows that. A trial is
    repeated later, and when costs have changed.
    """

    name: str = "adaptive"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, demands: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        pieces = coalesced(costs)
        unfit = frozenset(query for query in costs.queries if pieces.alone_bytes(query) > budget_bytes)
        if any(demand.staleness for demand in demands.values()):
            return planned(pieces, demands, unfit, budget_bytes)
        promise = Promise(Reference(PAPER, PAPER.plan(pieces, demands, budget_bytes), demands), unfit)
        order = least_moving_order(pieces, budget_bytes)
        return Plan(order, largest_batches(pieces, budget_bytes), budget_bytes, promise)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        if not isinstance(plan.detail, Promise):
            return decided(state, costs, plan)
        course: Course = state.policy_state or _begun(state.now, plan.detail)
        if not state.waiting:
            # The shadow can catch up when something is to be decided: nothing it does not know of has come.
            return Decision(policy_state=course)
        book = course.book.seen(state, costs, plan.detail.reference)
        course = _tried(replace(course, book=book), state, costs, plan)
        if course.passed is not None:
            decision = freely(state, costs, plan, course.book)
            return replace(decision, policy_state=replace(course, book=decision.policy_state))
        if course.rejoin_by is not None:
            return _rejoining(course, course.rejoin_by, state, costs, plan)
        decision, book = followed(state, costs, plan, course.book, course.turns)
        return replace(decision, policy_state=replace(course, book=book, turns=decision.policy_state))


def _begun(now: float, promise: Promise) -> Course:
    return Course(Book(Shadow(VirtualBox(now))), first_trial(now, promise.demands))


def _tried(course: Course, state: SchedulerState, costs: Costs, plan: Plan) -> Course:
    """The course once the book and the trial have been looked at, and a trial that is due has begun."""
    now = state.now
    if course.passed is not None and not course.passed.bears(course.book):
        return course.barred(now, BROKEN_TIMES)
    if course.trial is None:
        due = now >= course.try_at and (course.passed is None or changed(course.passed.costs, costs))
        lead_s = LEAD_S if course.passed is None else 0.0
        return replace(course, trial=Trial(state, course.book, costs, plan, lead_s), steps=0) if due else course
    steps = course.steps + STEPS
    passed = verdict(course.trial, steps, now)
    if passed is None:
        return replace(course, steps=steps)
    if not passed:
        return course.barred(now)
    opened = course.book.opened()
    return replace(course, book=opened, passed=course.trial, trial=None, rejoin_by=None, try_at=now + AGAIN_S)


def _rejoining(course: Course, rejoin_by: float, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
    shadow, over = course.book.shadow, state.now >= rejoin_by
    step = rejoined(state, costs, shadow)
    if step is not None and not over:
        return replace(step, policy_state=course)
    together = over or state.resident == shadow.box.resident
    left, drop = unseen(state, shadow)
    decision, book = followed(left, costs, plan, course.book, shadow.policy_state)
    policy_state = replace(course, book=book, turns=decision.policy_state, rejoin_by=None if together else rejoin_by)
    return replace(decision, drop=drop + decision.drop, policy_state=policy_state)
