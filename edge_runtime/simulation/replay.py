"""Replay: a recorded run once more through the schedule, with the durations that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemel.edge_runtime.frames.queues import DEADLINE
from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import Decision, Policy, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import CostEstimates
from gemel.edge_runtime.simulation.simulator import BoxObserver, VirtualBox, simulate
from gemel.edge_runtime.simulation.trace import (
    TraceArrival,
    TraceHeader,
    TraceStep,
    consistent_line,
    numbered_names,
    read_trace,
    trace_costs,
)


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
    with consistent_line(f"{path}: line 1"):
        box = _RecordedBox(head, policy)
    for where, line in lines:
        with consistent_line(where):
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
        box.specs,
    )
    predicted = {row["id"]: row["processed"] for row in free.per_query()}
    received = {query: len(times) for query, times in arrivals.items()}
    return ReplayResult(box.decisions, box.same, box.first_difference, received, box.processed, predicted)


class _RecordedBox:
    """The recorded box: its mailboxes and its costs follow the replayed decisions, its clock and memory the record."""

    def __init__(self, head: TraceHeader, policy: Policy) -> None:
        self.policy = policy
        self.specs = {
            query: QuerySpec(one.fps, one.urgency, tuple(one.staleness)) for query, one in head.demands.items()
        }
        best_s = {query: one.best_s for query, one in head.queries.items() if one.best_s is not None}
        self.estimates = CostEstimates(trace_costs(head), best_s)
        costs = self.estimates.costs
        self.budget_bytes = head.budget_bytes
        self.plan = policy.plan(costs, self.specs, self.budget_bytes)
        self.box = VirtualBox(costs, self._decide, BoxObserver(), [], resident=frozenset(numbered_names(head.resident)))
        self.arrivals: dict[str, list[float]] = {query: [] for query in costs.queries}
        self.processed = dict.fromkeys(costs.queries, 0)
        self.decisions = self.same = 0
        self.first_difference: str | None = None

    def arrive(self, query: str, captured_at: float, at: float) -> None:
        """A frame; the trace may hold it after a decision before which it came, and the other way round."""
        self.arrivals[query].append(captured_at)
        self.box.announce(at, query, captured_at)

    def step(self, line: TraceStep) -> None:
        """Decide again at the moment of a recorded decision, and take over what that took."""
        if line.budget_bytes != self.budget_bytes:
            self.budget_bytes = line.budget_bytes
            self.plan = self.policy.plan(self.estimates.costs, self.specs, self.budget_bytes)
        box, (appeared, vanished) = self.box, line.resident
        box.now, box.urgency = line.at, line.urgency
        box.resident = (box.resident | set(numbered_names(appeared))) - set(numbered_names(vanished))
        box.resident_bytes = box.costs.resident_bytes(box.resident)
        box.deliver()
        decision = box.next_decision()
        self._compare(line, decision)
        for query, captured_at, reason in decision.drop:
            box.drop(query, captured_at, reason)
            if reason == DEADLINE:
                self.estimates.lower_run_s(query)
        box.change_resident(decision)
        if decision.query is not None:
            for query, count in decision.runs:
                box.take(query, count)
        if line.query is not None:
            self._measure(line, line.query)

    def _decide(self, state: SchedulerState) -> Decision:
        return self.policy.decide(state, self.estimates.costs, self.plan)

    def _compare(self, line: TraceStep, decision: Decision) -> None:
        load, evict = (frozenset(numbered_names(numbers)) for numbers in (line.load, line.evict))
        # Drops of several queries come in the order of the mailboxes, which a record does not hold.
        recorded = (line.query, line.count, load, evict, frozenset(line.drop), tuple(line.also))
        replayed = (
            decision.query, decision.count, frozenset(decision.load), frozenset(decision.evict),
            frozenset(decision.drop), decision.also,
        )  # fmt: skip
        if not any((line.query, line.drop, decision.query, decision.drop)):
            return
        self.decisions += 1
        self.same += recorded == replayed
        if recorded != replayed and self.first_difference is None:
            before, after = (
                f"{query} x{count}, {len(load)} loaded, {len(evict)} evicted, {len(drop)} dropped"
                for query, count, load, evict, drop, _ in (recorded, replayed)
            )
            self.first_difference = f"at {line.at:.6f}: recorded {before}, replayed {after}"

    def _measure(self, line: TraceStep, query: str) -> None:
        if line.load_s is not None:
            self.estimates.record_load(query, line.moved_bytes, line.load_s)
        if line.run_s is not None and line.also:
            self.estimates.record_joint(query, line.count + sum(count for _, count in line.also), line.run_s)
        elif line.run_s is not None:
            self.estimates.record_run(query, line.count, line.run_s)
        for name, count in ((query, line.count), *line.also):
            self.processed[name] += count
