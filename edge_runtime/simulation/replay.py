"""Replay: a recorded run once more through the schedule, with the durations that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from edge_runtime.policies import policy_named
from edge_runtime.queues import DEADLINE, Frame, Ledger, Mailboxes
from edge_runtime.scheduler import Decision, Policy, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import CostEstimates
from edge_runtime.simulation.simulator import simulate
from edge_runtime.simulation.trace import TraceArrival, TraceHeader, TraceStep, numbered_names, read_trace, trace_costs


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    `decisions` counts those that did anything, recorded or replayed; `same` those that were equal in every part.
    `first_difference` tells of the first that was not. `predicted` is, per query, how many frames the simulator
    processes when it knows only the arrivals and the costs known at the start, beside `processed`, what really was.
    """

    decisions: int
    same: int
    first_difference: str | None
    received: Mapping[str, int]
    processed: Mapping[str, int]
    predicted: Mapping[str, int]

    @property
    def agreement(self) -> float:
        return self.same / self.decisions if self.decisions else 1.0

    @property
    def error(self) -> float:
        """The mean over queries of |predicted - processed| as a share of the frames received."""
        shares = [
            abs(self.predicted[query] - self.processed[query]) / received
            for query, received in self.received.items()
            if received
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "decisions": self.decisions, "same": self.same, "agreement": self.agreement,
            "first_difference": self.first_difference, "error": self.error,
            "queries": [{"id": query, "received": received, "processed": self.processed[query],
                         "predicted": self.predicted[query]} for query, received in self.received.items()],
        }  # fmt: skip


def replay(path: str | Path) -> ReplayResult:
    """Replay a trace. Every decision is made again from the recorded moments, arrivals and durations.

    Raises InputError for a file that is no trace.
    """
    head, lines = read_trace(path)
    policy = policy_named(head.policy, f"{path}: line 1", "policy")
    box = _Box(head, policy)
    for line in lines:
        if isinstance(line, TraceArrival):
            box.arrive(*line.frame)
        else:
            box.step(line)
    arrivals = {query: sorted(times) for query, times in box.arrivals.items()}
    start = min((times[0] for times in arrivals.values() if times), default=0.0)
    free = simulate(
        trace_costs(head),
        {query: [at - start for at in times] for query, times in arrivals.items()},
        head.budget_bytes,
        policy,
        box.demands,
    )
    predicted = {row["id"]: row["processed"] for row in free.per_query()}
    received = {query: len(times) for query, times in arrivals.items()}
    return ReplayResult(box.decisions, box.same, box.first_difference, received, box.processed, predicted)


class _Box:
    """The recorded box: its queue and its beliefs follow the replayed decisions, its clock and memory the record."""

    def __init__(self, head: TraceHeader, policy: Policy) -> None:
        costs = trace_costs(head)
        self.policy = policy
        self.demands = {
            query: QuerySpec(one.fps, one.urgency, tuple(one.staleness)) for query, one in head.demands.items()
        }
        self.estimates = CostEstimates(
            costs, {query: one.best_s for query, one in head.queries.items() if one.best_s is not None}
        )
        self.budget_bytes = head.budget_bytes
        self.plan = self.policy.plan(costs, self.demands, self.budget_bytes)
        self.mailboxes = Mailboxes(costs.queries, Ledger(costs.queries))
        self.arrivals: dict[str, list[float]] = {query: [] for query in costs.queries}
        self.processed = dict.fromkeys(costs.queries, 0)
        self.resident = set(numbered_names(head.resident))
        self.policy_state: Any = None
        self.late_news: list[tuple[float, int, str, float]] = []  # a heap: told at, in which place, query, captured at
        self.told = 0
        self.decisions = self.same = 0
        self.first_difference: str | None = None

    def arrive(self, query: str, captured_at: float, at: float) -> None:
        self.arrivals[query].append(captured_at)
        heappush(self.late_news, (at, self.told, query, captured_at))
        self.told += 1

    def step(self, line: TraceStep) -> None:
        self._deliver(line.at)
        if line.budget_bytes != self.budget_bytes:
            self.budget_bytes = line.budget_bytes
            self.plan = self.policy.plan(self.estimates.costs, self.demands, self.budget_bytes)
        appeared, vanished = line.resident
        self.resident = (self.resident | set(numbered_names(appeared))) - set(numbered_names(vanished))
        resident = frozenset(self.resident)
        costs = self.estimates.costs
        decision = self.policy.decide(
            SchedulerState(
                line.at,
                self.mailboxes.pending(),
                resident,
                costs.resident_bytes(resident),
                self.policy_state,
                line.urgency,
            ),
            costs,
            self.plan,
        )
        self._compare(line, decision)
        self.policy_state = decision.policy_state
        self._carry_out(line, decision)

    def _deliver(self, now: float) -> None:
        """Frames told of after a decision may have come before it, and the other way round."""
        while self.late_news and self.late_news[0][0] <= now:
            _, _, query, captured_at = heappop(self.late_news)
            self.mailboxes.put(query, Frame(0, captured_at))

    def _compare(self, line: TraceStep, decision: Decision) -> None:
        recorded = (
            line.query,
            line.count,
            set(numbered_names(line.load)),
            set(numbered_names(line.evict)),
            list(line.drop),
        )
        replayed = (decision.query, decision.count, set(decision.load), set(decision.evict), list(decision.drop))
        if recorded[0] is None and replayed[0] is None and not recorded[4] and not replayed[4]:
            return
        self.decisions += 1
        self.same += recorded == replayed
        if recorded != replayed and self.first_difference is None:
            self.first_difference = f"at {line.at:.6f}: recorded {_short(recorded)}, replayed {_short(replayed)}"

    def _carry_out(self, line: TraceStep, decision: Decision) -> None:
        for query, captured_at, reason in decision.drop:
            self.mailboxes.drop(query, captured_at, reason)
            if reason == DEADLINE:
                self.estimates.doubt(query)
        self.resident = (self.resident - set(decision.evict)) | set(decision.load)
        if decision.query is not None:
            self.mailboxes.take(decision.query, decision.count)
        query = line.query
        if query is None:
            return
        if line.load_s is not None:
            self.estimates.loaded(query, line.moved_bytes, line.load_s)
        if line.run_s is not None:
            self.estimates.ran(query, line.count, line.run_s)
        self.processed[query] += line.count


def _short(decision: Sequence[Any]) -> str:
    turn, count, load, evict, drop = decision
    return f"{turn} x{count}, {len(load)} loaded, {len(evict)} evicted, {len(drop)} dropped"
