"""`ours`: the most frames in time that leave no query much worse off than the paper's schedule would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.frames.ledger import DEADLINE, MEMORY
from edge_runtime.policies.book import Book
from edge_runtime.policies.choice import Choice
from edge_runtime.policies.jobs import in_time_together
from edge_runtime.policies.paper import Paper
from edge_runtime.policies.shadow import Shadow
from edge_runtime.schedule.batches import largest_batches
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.order import least_moving_order
from edge_runtime.schedule.pieces import condensed
from edge_runtime.schedule.values import CLOCK_SLACK_S, Decision, Demand, Plan, Situation

Dropped = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class Promise:
    """What `ours` settles beforehand: the paper's plan, against which it is measured, and the queries' demands.

    `unfit` are the queries that do not fit the budget even alone.
    """

    paper: Plan
    demands: Mapping[str, Demand]
    unfit: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ours:
    """Of all that could run next, what brings most frames in time, weighed by what stale results cost.

    Queries whose weights are resident run by deadline, and when not all frames can be in time, those are given up
    that bring least for their time (`in_time_together`). A load is one more thing that could run: it brings the
    frames that it makes possible, and costs its time, the reloading of what it evicts, and the frames that resident
    queries lose meanwhile; so a loaded query stays for as long as no other would bring more. Batches grow for as
    long as a further frame brings more than it costs, a workspace that drives out weights included. What is needed
    last in the order that moves least is evicted first. So that nobody starves, each query is owed a share of
    what the paper's schedule would bring it on the same frames (`Book`), and the more it is owed, the more its frames
    count, as in max-weight scheduling (Tassiulas and Ephremides 1992).
    """

    name: str = "ours"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> Plan:
        pieces = condensed(costs)
        unfit = frozenset(query for query in costs.queries if pieces.alone_bytes(query) > budget_bytes)
        promise = Promise(Paper().plan(pieces, demands, budget_bytes), demands, unfit)
        order = least_moving_order(pieces, budget_bytes)
        return Plan(order, largest_batches(pieces, budget_bytes), budget_bytes, promise)

    def decide(self, situation: Situation, costs: Costs, plan: Plan) -> Decision:
        promise: Promise = plan.detail
        book: Book = situation.recall or Book(Shadow(situation.now))
        if not situation.waiting:
            # The shadow can catch up when something is to be decided: nothing it does not know of has come.
            return Decision(recall=book)
        shadow = book.shadow.until(situation.now, situation.waiting, costs, promise.paper)
        book = Book(shadow, book.ran, book.newest)
        drop, waiting = hopeless(situation, costs, promise.unfit)
        if not waiting:
            return Decision(drop=drop, recall=book)
        choice = Choice(situation, waiting, costs, plan, book)
        kept = in_time_together(situation.now, choice.jobs())
        ahead = choice.load_ahead(kept)
        if ahead is not None:
            return Decision(ahead.query, 0, ahead.evict, ahead.missing, drop, recall=book)
        again_s = []
        for job in kept:
            barred_until = choice.barred_until(job)
            if barred_until is not None:
                again_s.append(barred_until + 2 * CLOCK_SLACK_S)
                continue
            run = choice.run(job)
            if run is not None:
                drop += tuple((job.query, captured_at, DEADLINE) for captured_at in run.given_up)
                return Decision(
                    job.query,
                    len(run.captured),
                    run.evict,
                    job.missing,
                    drop,
                    recall=book.with_run(job.query, run.captured),
                )
        # None of these is worth a run now; once the first of them is lost it must be dropped, and once a better one has
        # not come it need not be waited for.
        lost_s = min(
            captured[0] + costs.queries[query].sla_s - costs.queries[query].run_s for query, captured in waiting.items()
        )
        return Decision(drop=drop, wake_s=min([lost_s + 2 * CLOCK_SLACK_S, *again_s]), recall=book)


def hopeless(
    situation: Situation, costs: Costs, unfit: frozenset[str]
) -> tuple[tuple[Dropped, ...], dict[str, Sequence[float]]]:
    """The frames to drop, which could not be in time even if they ran now and alone; and what else waits."""
    drop: list[Dropped] = []
    waiting: dict[str, Sequence[float]] = {}
    for query, captured in situation.waiting.items():
        if query in unfit:
            drop += [(query, captured_at, MEMORY) for captured_at in captured]
            continue
        cost = costs.queries[query]
        oldest = situation.now + cost.run_s - cost.sla_s - CLOCK_SLACK_S
        late = 0
        while late < len(captured) and captured[late] < oldest:
            drop.append((query, captured[late], DEADLINE))
            late += 1
        if late < len(captured):
            waiting[query] = captured[late:]
    return tuple(drop), waiting
