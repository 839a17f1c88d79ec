"""Following the reference: from its own state, or back to it from another, so that the same frames are run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.book import Book
from edge_runtime.queues import DEADLINE
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, SchedulerState


def followed(state: SchedulerState, costs: Costs, plan: Plan, book: Book, policy_state: Any) -> tuple[Decision, Book]:
    """The reference's next decision, which holds what it is to recall, and the book after it."""
    decision = plan.detail.reference.decide(replace(state, policy_state=policy_state), costs)
    if decision.query is None or not decision.count:
        return decision, book
    late = {captured_at for query, captured_at, _ in decision.drop if query == decision.query}
    left = [captured_at for captured_at in state.waiting[decision.query] if captured_at not in late]
    return decision, book.with_run(decision.query, left[: decision.count])


def rejoined(state: SchedulerState, costs: Costs, shadow: Shadow) -> Decision | None:
    """A step back to where the shadow is; None at a moment from which its schedule can be followed.

    From another state the paper's schedule may never serve a query that it serves from its own: with frames that come
    evenly, turns fall into a rhythm. So the box does without a few runs, loads what the shadow has just loaded, and
    waits until the shadow is done with what it does. Other tensors that are missing come with their queries' turns.
    """
    box = shadow.box
    last = shadow.policy_state.recent[0] if shadow.policy_state and shadow.policy_state.recent else None
    if last is not None and costs.queries[last].needed <= box.resident:
        missing = tuple(name for name in costs.queries[last].tensors if name not in state.resident)
        if missing:
            evict = tuple(sorted(state.resident - box.resident))
            return Decision(last, 0, evict, missing)
    return Decision(wake_s=box.now) if box.now > state.now + CLOCK_SLACK_S else None


def unseen(state: SchedulerState, shadow: Shadow) -> tuple[SchedulerState, tuple[tuple[str, float, str], ...]]:
    """The situation with the frames alone that the shadow has yet to settle, and the others, to be dropped."""
    left = {query: set(captured) for query, captured in shadow.box.waiting.items()}
    for captured_at, query in shadow.box.coming:
        left.setdefault(query, set()).add(captured_at)
    waiting = {
        query: kept
        for query, captured in state.waiting.items()
        if (kept := tuple(one for one in captured if one in left.get(query, ())))
    }
    drop = tuple(
        (query, one, DEADLINE)
        for query, captured in state.waiting.items()
        for one in captured
        if one not in waiting.get(query, ())
    )
    return replace(state, waiting=waiting), drop
