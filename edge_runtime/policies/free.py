"""The free choice: no turns, but at each moment what brings most frames in time."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.policies.book import Book
from edge_runtime.policies.choice import Choice
from edge_runtime.policies.jobs import in_time_together
from edge_runtime.queues import DEADLINE, MEMORY
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, SchedulerState

Dropped = tuple[str, float, str]


def freely(state: SchedulerState, costs: Costs, plan: Plan, book: Book) -> Decision:
    """Of all that could run next, what brings most frames in time, weighed by what stale results cost.

    `book` is kept up to this moment; the decision's `recall` is the book afterwards. Queries whose weights are
    resident run by deadline, and when not all frames can be in time, those are given up that bring least for their time
    (`in_time_together`). A load is one more thing that could run: it brings the frames that it makes possible, and
    costs its time, the reloading of what it evicts, and the frames that resident queries lose meanwhile; so a loaded
    query stays for as long as no other would bring more. Batches grow for as long as a further frame brings more than
    it costs, a workspace that drives out weights included. What is needed last in the order that moves least is evicted
    first. Each query is owed a share of what the paper's schedule would bring it on the same frames (`Book`), and the
    more it is owed, the more its frames count, as in max-weight scheduling (Tassiulas and Ephremides 1992).
    """
    drop, waiting = hopeless(state, costs, plan.detail.unfit)
    if not waiting:
        return Decision(drop=drop, policy_state=book)
    choice = Choice(state, waiting, costs, plan, book)
    kept = in_time_together(state.now, choice.jobs())
    ahead = choice.load_ahead(kept)
    if ahead is not None:
        return Decision(ahead.query, 0, ahead.evict, ahead.missing, drop, policy_state=book)
    again_s = []
    for job in kept:
        barred_until = choice.barred_until(job)
        if barred_until is not None:
            again_s.append(barred_until + 2 * CLOCK_SLACK_S)
            continue
        run = choice.run(job)
        if run is not None:
            drop += tuple((job.query, captured_at, DEADLINE) for captured_at in run.given_up)
            policy_state = book.with_run(job.query, run.captured)
            return Decision(job.query, len(run.captured), run.evict, job.missing, drop, policy_state=policy_state)
    # None of these is worth a run now; once the first of them is lost it must be dropped, and once a better one has
    # not come it need not be waited for.
    lost_s = min(
        captured[0] + costs.queries[query].sla_s - costs.queries[query].run_s for query, captured in waiting.items()
    )
    return Decision(drop=drop, wake_s=min([lost_s + 2 * CLOCK_SLACK_S, *again_s]), policy_state=book)


def hopeless(
    state: SchedulerState, costs: Costs, unfit: frozenset[str]
) -> tuple[tuple[Dropped, ...], dict[str, Sequence[float]]]:
    """The frames to drop, which could not be in time even if they ran now and alone; and what else waits."""
    drop: list[Dropped] = []
    waiting: dict[str, Sequence[float]] = {}
    for query, captured in state.waiting.items():
        if query in unfit:
            drop += [(query, captured_at, MEMORY) for captured_at in captured]
            continue
        cost = costs.queries[query]
        oldest = state.now + cost.run_s - cost.sla_s - CLOCK_SLACK_S
        late = 0
        while late < len(captured) and captured[late] < oldest:
            drop.append((query, captured[late], DEADLINE))
            late += 1
        if late < len(captured):
            waiting[query] = captured[late:]
    return tuple(drop), waiting
