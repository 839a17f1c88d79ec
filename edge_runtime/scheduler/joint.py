"""Joint passes in the schedule: queries that join a run because one pass for all takes less than a run for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemel.edge_runtime.frames.queues import DEADLINE, DEPTH
from gemel.edge_runtime.scheduler.batches import too_late
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.eviction import pick_evictions_for
from gemel.edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, QuerySpec, SchedulerState


def join_queries(decision: Decision, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
    """The decision with every query that joins its run; the same decision where none does.

    A query joins with its oldest waiting frames where that saves time against a run of its own, every frame of the run
    is still in time, and memory suffices. The query whose oldest frame is due first joins first.
    """
    joint = costs.joint_of(decision.query) if decision.query is not None and decision.count else None
    if joint is None or decision.query is None or decision.count >= joint.cost.largest:
        return decision
    waiting = {query: waiting_after_drops(state, decision, query) for query in joint.queries}
    first = waiting[decision.query][0]
    chosen = _Joining(decision, first + costs.queries[decision.query].sla_s)
    others = [query for query in joint.queries if query != decision.query and waiting[query]]
    for query in sorted(others, key=lambda query: (waiting[query][0] + costs.queries[query].sla_s, query)):
        chosen.add(query, waiting[query], state, costs, plan)
    return chosen.decision


LATE_SHARE = 0.1
"""How late an expected frame may be, as a share of its query's period, before its pass is given up."""


def wait_for_pass(
    decision: Decision, state: SchedulerState, costs: Costs, specs: Mapping[str, QuerySpec],
    newest: Mapping[str, float],
) -> float | None:  # fmt: skip
    """Until when to wait with a run for the next frame of another query of its pass; None to run now.

    The box waits where one pass for both takes less time than two runs and nothing else could run meanwhile. Every
    waiting frame stays in time even if that frame does not come and the longest run of another query begins first, no
    mailbox overflows, and frames of all other queries that come at once when the pass begins are in time behind it.
    `newest` is when each query's last frame was captured.
    """
    joint = costs.joint_of(decision.query) if decision.query is not None and decision.count else None
    if (
        joint is None
        or decision.query is None
        or decision.also
        or decision.load
        or set(state.waiting) != {decision.query}
    ):
        return None
    query, count, now = decision.query, decision.count, state.now
    if count >= joint.cost.largest:
        return None
    cost, pass_s = costs.queries[query], joint.cost.run_of(count + 1)
    others = {one: costs.queries[one] for one in newest if one != query}
    if not others or pass_s + sum(one.run_s for one in others.values()) > min(one.sla_s for one in others.values()):
        return None
    joining = [one for one in joint.queries if one in others and others[one].needed <= state.resident]
    comes = {one: newest[one] + 1 / specs[one].fps for one in joining}
    comes = {one: at for one, at in comes.items() if at + LATE_SHARE / specs[one].fps > now}
    if not comes:
        return None
    first = min(comes, key=lambda one: (comes[one], one))
    until = comes[first] + LATE_SHARE / specs[first].fps
    longest_s = max(one.run_s for one in costs.queries.values())
    captured = waiting_after_drops(state, decision, query)
    # Where the mailbox is full when the next frame comes, the oldest is lost before its deadline.
    full_s = captured[-1] + (DEPTH + 1 - len(captured)) / specs[query].fps
    due = min(captured[0] + cost.sla_s, full_s + pass_s)
    if pass_s >= cost.run_of(count) + costs.queries[first].run_s or until + longest_s + pass_s > due:
        return None
    return until


class _Joining:
    """A decision that grows; `due` is when the first frame of its run must be done."""

    def __init__(self, decision: Decision, due: float) -> None:
        self.decision, self.due = decision, due

    def add(
        self, query: str, captured: Sequence[float], state: SchedulerState, costs: Costs, plan: Plan
    ) -> None:  # fmt: skip
        """Let a query join with as many frames as possible."""
        decision, joint = self.decision, costs.joint_of(query)
        assert joint is not None
        cost, total = costs.queries[query], sum(count for _, count in decision.runs)
        if total >= joint.cost.largest:
            return
        own = [name for name in cost.tensors if name not in state.resident]
        missing = [name for name in own if name not in decision.load]
        load = (*decision.load, *missing)
        start = state.now + costs.load_s(costs.moved_bytes(load))
        late = too_late(captured, state.now + costs.load_s(costs.moved_bytes(own)), cost, 1)
        frames = captured[late:]
        queries = (*(name for name, _ in decision.runs), query)
        before_s = costs.load_s(costs.moved_bytes(decision.load)) + run_seconds(costs, decision.runs)
        freed = costs.resident_bytes(decision.evict)
        used = state.resident_bytes - freed + costs.resident_bytes(load)
        for count in range(min(len(frames), joint.cost.largest - total), 0, -1):
            finish = start + joint.cost.run_of(total + count)
            due = min(self.due, frames[0] + cost.sla_s)
            alone_s = costs.load_s(costs.moved_bytes(own)) + cost.run_of(min(count, cost.largest))
            if finish > due + CLOCK_SLACK_S or finish - state.now >= before_s + alone_s:
                continue
            workspace = joint.cost.workspace_of(total + count)
            evict = pick_evictions_for(state, costs, plan, queries, load, workspace)
            if evict is None:
                continue
            # What goes for the larger workspace alone must be loaded again.
            alone_bytes = max(0, used + cost.workspace_of(min(count, cost.largest)) - plan.budget_bytes)
            again_s = costs.load_s(max(0, costs.resident_bytes(evict) - freed - alone_bytes))
            if finish - state.now + again_s >= before_s + alone_s:
                continue
            drop = (*decision.drop, *((query, captured_at, DEADLINE) for captured_at in captured[:late]))
            self.due = due
            self.decision = replace(decision, load=load, evict=evict, drop=drop, also=(*decision.also, (query, count)))
            return


def waiting_after_drops(state: SchedulerState, decision: Decision, query: str) -> tuple[float, ...]:
    """A query's waiting frames (captured_at) without those that the decision drops."""
    dropped = {captured_at for name, captured_at, _ in decision.drop if name == query}
    return tuple(captured_at for captured_at in state.waiting.get(query, ()) if captured_at not in dropped)


def run_seconds(costs: Costs, runs: Sequence[tuple[str, int]]) -> float:
    """Seconds of one run of these (query, frames)."""
    if len(runs) == 1:
        return costs.queries[runs[0][0]].run_of(runs[0][1])
    joint = costs.joint_of(runs[0][0])
    assert joint is not None, "the queries have no joint pass"
    return joint.cost.run_of(sum(count for _, count in runs))


def run_workspace(costs: Costs, runs: Sequence[tuple[str, int]]) -> int:
    """Workspace of one run of these (query, frames)."""
    if len(runs) == 1:
        return costs.queries[runs[0][0]].workspace_of(runs[0][1])
    joint = costs.joint_of(runs[0][0])
    assert joint is not None, "the queries have no joint pass"
    return joint.cost.workspace_of(sum(count for _, count in runs))
