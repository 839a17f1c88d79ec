"""`gemel`: the paper's schedule (Padmanabhan et al., NSDI 2023, section 5.4, edge inference)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gemel.edge_runtime.frames.queues import DEADLINE, MEMORY
from gemel.edge_runtime.scheduler.batches import batch_in_time, worst_first_batches
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors
from gemel.edge_runtime.scheduler.joint import join_queries
from gemel.edge_runtime.scheduler.order import share_order
from gemel.edge_runtime.scheduler.types import Decision, Plan, QuerySpec, SchedulerState


@dataclass(frozen=True, slots=True)
class TurnHistory:
    """Whose turn it has been: queries by their last turn, most recent first.

    `loaded` is the query just loaded ahead, whose run is still due; `passed` counts the turns of each query that
    were passed over as too late since it last had one.
    """

    recent: tuple[str, ...] = ()
    loaded: str | None = None
    passed: Mapping[str, int] = field(default_factory=dict)

    def after(self, turn: str | None, ran: bool, late: Sequence[str]) -> TurnHistory:
        """The turns once `turn` has been taken and the queries in `late` were passed over."""
        passed = {**self.passed, **{query: self.passed.get(query, 0) + 1 for query in late}}
        if turn is None:
            return TurnHistory(self.recent, passed=passed)
        passed.pop(turn, None)
        recent = (turn, *(query for query in self.recent if query != turn))
        return TurnHistory(recent, None if ran else turn, passed)


@dataclass(frozen=True, slots=True)
class GemelPolicy:
    """The paper's schedule: queries take turns in an order in which neighbours share most bytes.

    Only missing tensors are loaded.

    Batch sizes are chosen beforehand so that the worst query's frames in time are most. The most recently run query
    is evicted first, since in a cycle its next turn is furthest away. A query passed over `patience` times for want of
    its tensors takes its turn all the same: it is loaded ahead, and its next frame finds it resident. Queries that one
    pass serves join the run of the one whose turn it is.
    """

    name: str = field(default="gemel", init=False)
    patience: int = 2
    """0, a load at every turn, spends on loads the time in which other queries' frames would have made it; with many a
    query that is slow to load is never run."""

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        pieces = coalesce_tensors(costs)
        order = share_order(pieces)
        return Plan(order, worst_first_batches(pieces, specs, order, budget_bytes), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        turns: TurnHistory = state.policy_state or TurnHistory()
        drop: list[tuple[str, float, str]] = []
        late: list[str] = []
        for query in _candidates(state, turns, plan.order):
            cost, waiting = costs.queries[query], state.waiting[query]
            missing = (
                ()
                if cost.needed <= state.resident
                else tuple(name for name in cost.tensors if name not in state.resident)
            )
            start = state.now + costs.load_s(costs.moved_bytes(missing))
            batch = batch_in_time(waiting, start, cost, plan.batches[query])
            load_ahead = bool(missing) and cost.run_s <= cost.sla_s and turns.passed.get(query, 0) >= self.patience
            drop += [(query, captured, DEADLINE) for captured in waiting[: batch.late]]
            if not batch.count:
                late.append(query)
                if not load_ahead:
                    continue
            evict = _room(state, turns, costs, plan, query, missing, max(1, batch.count))
            if evict is None:
                drop += [(query, captured, MEMORY) for captured in waiting[batch.late :]]
                continue
            decision = join_queries(Decision(query, batch.count, evict, missing, tuple(drop)), state, costs, plan)
            for other, _ in decision.also:  # before the query itself, after which the cycle goes on
                turns = turns.after(other, True, ())
            return replace(decision, policy_state=turns.after(query, batch.count > 0, late))
        return Decision(drop=tuple(drop), policy_state=turns.after(None, False, late))


def _candidates(state: SchedulerState, turns: TurnHistory, order: Sequence[str]) -> list[str]:
    """Queries with a waiting frame: the one loaded ahead, then round the cycle from the last turn on."""
    start = order.index(turns.recent[0]) + 1 if turns.recent else 0
    cycle = [*order[start:], *order[:start]]
    if turns.loaded is not None:
        cycle = [turns.loaded, *(query for query in cycle if query != turns.loaded)]
    return [query for query in cycle if query in state.waiting]


def _room(
    state: SchedulerState,
    turns: TurnHistory,
    costs: Costs,
    plan: Plan,
    query: str,
    missing: Sequence[str],
    count: int,
) -> tuple[str, ...] | None:
    """The tensors to evict so that the query fits, as few as the eviction order allows; None if it never fits."""
    cost = costs.queries[query]
    excess = state.resident_bytes + costs.resident_bytes(missing) + cost.workspace_of(count) - plan.budget_bytes
    if excess <= 0:
        return ()
    evict: list[str] = []
    for names in plan.next_use.of(costs, _coming(turns, plan.order), (query,), state.resident):
        for name in reversed(names):
            evict.append(name)
            excess -= costs.footprints[name]
            if excess <= 0:
                return tuple(evict)
    return None


def _coming(turns: TurnHistory, order: Sequence[str]) -> tuple[str, ...]:
    """The queries by their next turn as far as it is known: those that have had none yet, then the least recent.

    So the most recently run query's tensors go first, last loaded layers first, and a tensor that several queries
    share goes with the last of them.
    """
    had = frozenset(turns.recent)
    return (*(query for query in order if query not in had), *reversed(turns.recent))
