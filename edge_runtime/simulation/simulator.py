"""The schedule on a virtual clock: what would become of every frame, without a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.queues import REPLACED, Frame, Ledger, Mailboxes
from edge_runtime.scheduler import CLOCK_SLACK_S, Decision, Plan, Policy, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs

PROCESSED, DROPPED, PENDING = "processed", "dropped", "pending"


@dataclass(frozen=True, slots=True)
class FrameOutcome:
    """What became of one frame: outcome processed, dropped (with the reason) or pending. Times in virtual seconds."""

    query: str
    index: int
    captured_at: float
    started_at: float | None = None
    finished_at: float | None = None
    outcome: str = PENDING
    reason: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """One change of what is resident, complete at `at_s`, made for `query`."""

    at_s: float
    query: str
    evicted: tuple[str, ...]
    loaded: tuple[str, ...]
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The outcome of a simulation. `bytes_moved` counts stored bytes loaded, `swaps` the loads that moved any.

    `costs` are those the policy saw, with the tensor names that `changes` speak of.
    """

    frames: tuple[FrameOutcome, ...]
    bytes_moved: int
    swaps: int
    max_used_bytes: int
    changes: tuple[Swap, ...]
    ledger: Ledger
    costs: Costs

    @property
    def timeline(self) -> tuple[tuple[float, str, frozenset[str], int], ...]:
        """(at_s, query loaded for, resident tensor names, resident bytes) after each change."""
        resident: set[str] = set()
        moments = []
        for change in self.changes:
            resident.difference_update(change.evicted)
            resident.update(change.loaded)
            moments.append((change.at_s, change.query, frozenset(resident), change.resident_bytes))
        return tuple(moments)

    def per_query(self) -> list[dict[str, Any]]:
        """Per query: id, received, processed, late, dropped (in all) and age_p95_ms of its results (None if none)."""
        ages: dict[str, list[float]] = {}
        for frame in self.frames:
            if frame.finished_at is not None:
                ages.setdefault(frame.query, []).append(frame.finished_at - frame.captured_at)
        return [
            {
                "id": account["query"],
                "received": account["received"],
                "processed": account["processed"],
                "late": account["late"],
                "dropped": sum(account["dropped"].values()),
                "age_p95_ms": age_p95_ms(ages.get(account["query"], ())),
            }
            for account in self.ledger.to_json()
        ]


def age_ms(ages_s: Iterable[float], percent: int) -> float | None:
    """A percentile (nearest rank) of ages in seconds, in milliseconds; None of none."""
    ordered = sorted(ages_s)
    return round(1000 * ordered[math.ceil(percent * len(ordered) / 100) - 1], 3) if ordered else None


def age_p95_ms(ages_s: Iterable[float]) -> float | None:
    """The 95th percentile of the same."""
    return age_ms(ages_s, 95)


def simulate(
    costs: Costs,
    arrivals: Mapping[str, Sequence[float]],
    budget_bytes: int,
    policy: Policy,
    demands: Mapping[str, QuerySpec] | None = None,
    plan: Plan | None = None,
    until_s: float = math.inf,
) -> Simulation:
    """Run the schedule over frames captured at the given times (seconds, ascending per query).

    Starts with nothing resident and ends when every frame is settled, or starts nothing more at `until_s`; frames
    then waiting or yet to come by `until_s` stay pending. Runs take exactly what `costs` says; loads and runs do not
    overlap. `demands` follow from the arrivals unless given; `plan` is made by the policy unless given. Same input,
    same result.
    """
    unknown = set(arrivals) - set(costs.queries)
    if unknown:
        raise ValueError(f"frames arrive for queries without costs: {sorted(unknown)}")
    seen = policy.view(costs)
    wanted = {query: QuerySpec(arrival_rate(arrivals.get(query, ()))) for query in costs.queries} | dict(demands or {})
    return _Box(seen, arrivals, policy, plan or policy.plan(seen, wanted, budget_bytes), until_s).play()


def arrival_rate(times: Sequence[float]) -> float:
    """Frames per second of arrivals; 1 where there are too few to tell."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 1.0


class _Box:
    """The virtual box: applies decisions to a clock that only they and the arrivals move."""

    def __init__(
        self, costs: Costs, arrivals: Mapping[str, Sequence[float]], policy: Policy, plan: Plan, until_s: float
    ) -> None:
        self.costs, self.policy, self.plan, self.until_s = costs, policy, plan, until_s
        self.feed = sorted(
            (at, query, index) for query, times in arrivals.items() for index, at in enumerate(times) if at <= until_s
        )
        self.fed = 0
        self.ledger = Ledger(costs.queries)
        self.mailboxes = Mailboxes(costs.queries, self.ledger)
        self.now = 0.0
        self.policy_state: Any = None
        self.resident: frozenset[str] = frozenset()
        self.resident_bytes = self.bytes_moved = self.max_used_bytes = 0
        self.changes: list[Swap] = []
        self.outcomes: dict[tuple[str, int], FrameOutcome] = {}

    def play(self) -> Simulation:
        while self.now < self.until_s:
            self.deliver()
            decision = self.decide()
            for query, captured_at, reason in decision.drop:
                self.settle_dropped(query, self.mailboxes.drop(query, captured_at, reason), reason)
            if decision.query is not None:
                self.carry_out(decision, decision.query)
            elif not self.sleep(decision.wake_s):
                break
        self.deliver()
        swaps = sum(bool(change.loaded) for change in self.changes)
        return Simulation(
            tuple(self.outcomes[query, index] for _, query, index in self.feed),
            self.bytes_moved,
            swaps,
            self.max_used_bytes,
            tuple(self.changes),
            self.ledger,
            self.costs,
        )

    def decide(self) -> Decision:
        state = SchedulerState(
            self.now, self.mailboxes.pending(), self.resident, self.resident_bytes, self.policy_state
        )
        decision = self.policy.decide(state, self.costs, self.plan)
        self.policy_state = decision.policy_state
        return decision

    def sleep(self, wake_s: float | None) -> bool:
        """Move the clock to the next frame, or to when the policy wants to be asked again; False when neither is."""
        upcoming = [self.feed[self.fed][0]] if self.fed < len(self.feed) else []
        if wake_s is not None and wake_s > self.now and (upcoming or self.mailboxes.pending()):
            upcoming.append(wake_s)
        self.now = min(upcoming, default=self.now)
        return bool(upcoming)

    def deliver(self) -> None:
        """Put every frame captured by now into its mailbox."""
        while self.fed < len(self.feed) and self.feed[self.fed][0] <= min(self.now, self.until_s):
            at, query, index = self.feed[self.fed]
            self.fed += 1
            self.outcomes[query, index] = FrameOutcome(query, index, at)
            self.settle_dropped(query, self.mailboxes.put(query, Frame(index, at)), REPLACED)

    def settle_dropped(self, query: str, frame: Frame | None, reason: str) -> None:
        if frame is not None:
            self.outcomes[query, frame.index] = FrameOutcome(
                query, frame.index, frame.captured_at, outcome=DROPPED, reason=reason
            )

    def carry_out(self, decision: Decision, query: str) -> None:
        if decision.evict or decision.load:
            self.resident = self.resident.difference(decision.evict).union(decision.load)
            self.resident_bytes += self.costs.resident_bytes(decision.load) - self.costs.resident_bytes(decision.evict)
            moved = self.costs.moved_bytes(decision.load)
            self.bytes_moved += moved
            self.now += self.costs.load_s(moved)
            self.changes.append(Swap(self.now, query, decision.evict, decision.load, self.resident_bytes))
        workspace_bytes = self.costs.queries[query].workspace_of(max(1, decision.count))
        self.max_used_bytes = max(self.max_used_bytes, self.resident_bytes + workspace_bytes)
        if decision.count:
            self.run(query, decision.count)

    def run(self, query: str, count: int) -> None:
        """Run the oldest waiting frames together."""
        cost = self.costs.queries[query]
        frames = self.mailboxes.take(query, count)
        assert len(frames) == count, "the schedule ran frames that do not wait"
        started = self.now
        self.now += cost.run_of(count)
        for frame in frames:
            late = self.now - frame.captured_at > cost.sla_s + CLOCK_SLACK_S
            self.ledger.processed(query, late)
            self.outcomes[query, frame.index] = FrameOutcome(
                query, frame.index, frame.captured_at, started, self.now, PROCESSED, late=late
            )
