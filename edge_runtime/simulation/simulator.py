"""The schedule on a virtual clock: what would become of every frame, without a device.

`VirtualBox` is the one event loop: `simulate` plays frames to their end with it, `replay` feeds it a recorded run, and
`edge_runtime.policies.selection` compares policies with it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemel.edge_runtime.frames.queues import DEPTH, REPLACED, Ledger
from gemel.edge_runtime.scheduler import CLOCK_SLACK_S, Decision, Policy, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.joint import run_seconds, run_workspace

PROCESSED, DROPPED, PENDING = "processed", "dropped", "pending"
Decide = Callable[[SchedulerState], Decision]


class BoxObserver:
    """What a virtual box reports; subclasses note what they need. Positions count a query's waiting frames from 0."""

    def on_arrival(self, query: str, captured_at: float) -> None:
        """A frame entered the query's mailbox."""

    def on_drop(self, query: str, position: int, reason: str) -> None:
        """A waiting frame was dropped."""

    def on_load(self, box: VirtualBox, decision: Decision) -> None:
        """Tensors were evicted or loaded; `box.now` is when that was complete."""

    def on_start(self, box: VirtualBox, decision: Decision) -> None:
        """A run begins, of one query or of several."""

    def on_run(self, query: str, captured: Sequence[float], started_at: float, finished_at: float) -> None:
        """The query's oldest waiting frames ran together."""


@dataclass(slots=True)
class VirtualBox:
    """A box on a virtual clock: its memory, its mailboxes, and what its policy remembers.

    `feed` holds the frames to come as (at, query, captured_at), in order of time from `fed` on. Loads and runs take
    what `costs` says, one after the other.
    """

    costs: Costs
    decide: Decide
    observer: BoxObserver
    feed: list[tuple[float, str, float]]
    now: float = 0.0
    resident: frozenset[str] = frozenset()
    resident_bytes: int = 0
    policy_state: Any = None
    urgency: Mapping[str, float] = field(default_factory=dict)
    waiting: dict[str, tuple[float, ...]] = field(default_factory=dict)
    fed: int = 0

    def step(self, until_s: float = math.inf) -> bool:
        """One decision and what it takes, or a sleep; False when there is nothing left to wait for."""
        self.deliver(until_s)
        decision = self.next_decision()
        for query, captured_at, reason in decision.drop:
            self.drop(query, captured_at, reason)
        if decision.query is None:
            return self._sleep(decision.wake_s)
        if decision.evict or decision.load:
            self.now += self.costs.load_s(self.change_resident(decision))
            self.observer.on_load(self, decision)
        if decision.count:
            started_at = self.now
            self.now += run_seconds(self.costs, decision.runs)
            self.observer.on_start(self, decision)
            for query, count in decision.runs:
                captured = self.take(query, count)
                assert len(captured) == count, "the schedule ran frames that do not wait"
                self.observer.on_run(query, captured, started_at, self.now)
        return True

    def deliver(self, until_s: float = math.inf) -> None:
        """Put every frame that came by now into its mailbox; a full mailbox drops its oldest frame."""
        now = min(self.now, until_s)
        while self.fed < len(self.feed) and self.feed[self.fed][0] <= now:
            _, query, captured_at = self.feed[self.fed]
            self.fed += 1
            held = self.waiting.get(query, ())
            if len(held) >= DEPTH:
                self.observer.on_drop(query, 0, REPLACED)
                held = held[1:]
            self.waiting[query] = (*held, captured_at)
            self.observer.on_arrival(query, captured_at)

    def announce(self, at: float, query: str, captured_at: float) -> None:
        """Add a frame to come."""
        insort(self.feed, (at, query, captured_at), lo=self.fed)

    def next_decision(self) -> Decision:
        """What the policy decides at this moment; nothing is changed but what it remembers."""
        decision = self.decide(
            SchedulerState(self.now, self.waiting, self.resident, self.resident_bytes, self.policy_state, self.urgency)
        )
        self.policy_state = decision.policy_state
        return decision

    def change_resident(self, decision: Decision) -> int:
        """Evict and load; the bytes that the load moves."""
        self.resident = self.resident.difference(decision.evict).union(decision.load)
        self.resident_bytes += self.costs.resident_bytes(decision.load) - self.costs.resident_bytes(decision.evict)
        return self.costs.moved_bytes(decision.load)

    def drop(self, query: str, captured_at: float, reason: str) -> None:
        """Drop a waiting frame; nothing where it does not wait any more."""
        held = self.waiting.get(query, ())
        if captured_at in held:
            position = held.index(captured_at)
            self._keep(query, held[:position] + held[position + 1 :])
            self.observer.on_drop(query, position, reason)

    def take(self, query: str, count: int) -> tuple[float, ...]:
        """Remove up to `count` of a query's oldest frames."""
        held = self.waiting.get(query, ())
        self._keep(query, held[count:])
        return held[:count]

    def _keep(self, query: str, held: tuple[float, ...]) -> None:
        if held:
            self.waiting[query] = held
        else:
            self.waiting.pop(query, None)

    def _sleep(self, wake_s: float | None) -> bool:
        """Move the clock to the next frame, or to when the policy wants to be called again; False when neither is."""
        upcoming = [self.feed[self.fed][0]] if self.fed < len(self.feed) else []
        if wake_s is not None and wake_s > self.now and (upcoming or self.waiting):
            upcoming.append(wake_s)
        self.now = min(upcoming, default=self.now)
        return bool(upcoming)


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


@dataclass
class Simulation(BoxObserver):
    """The outcome of a simulation, noted while it runs.

    `costs` are those the policy saw, with the tensor names that `changes` speak of; `bytes_moved` counts stored bytes
    loaded, `joint_runs` the runs of several queries.
    """

    costs: Costs
    frames: list[FrameOutcome] = field(default_factory=list)
    changes: list[Swap] = field(default_factory=list)
    bytes_moved: int = 0
    max_used_bytes: int = 0
    joint_runs: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.costs.queries)
        self._counts = Counter[str]()
        self._waiting: dict[str, list[int]] = {query: [] for query in self.costs.queries}  # places in `frames`

    @property
    def swaps(self) -> int:
        """The loads that moved any bytes."""
        return sum(bool(change.loaded) for change in self.changes)

    def on_arrival(self, query: str, captured_at: float) -> None:
        self._waiting[query].append(len(self.frames))
        self.frames.append(FrameOutcome(query, self._counts[query], captured_at))
        self._counts[query] += 1
        self.ledger.count_received(query)

    def on_drop(self, query: str, position: int, reason: str) -> None:
        place = self._waiting[query].pop(position)
        self.frames[place] = replace(self.frames[place], outcome=DROPPED, reason=reason)
        self.ledger.count_dropped(query, reason)

    def on_load(self, box: VirtualBox, decision: Decision) -> None:
        query = str(decision.query)
        self.bytes_moved += self.costs.moved_bytes(decision.load)
        self.changes.append(Swap(box.now, query, decision.evict, decision.load, box.resident_bytes))
        self._use(self.costs.queries[query].workspace_of(max(1, decision.count)))

    def on_start(self, box: VirtualBox, decision: Decision) -> None:
        self.joint_runs += len(decision.runs) > 1
        self._use(run_workspace(self.costs, decision.runs))

    def on_run(self, query: str, captured: Sequence[float], started_at: float, finished_at: float) -> None:
        sla_s = self.costs.queries[query].sla_s
        for captured_at in captured:
            place = self._waiting[query].pop(0)
            late = finished_at - captured_at > sla_s + CLOCK_SLACK_S
            self.frames[place] = replace(
                self.frames[place], started_at=started_at, finished_at=finished_at, outcome=PROCESSED, late=late
            )
            self.ledger.count_processed(query, late)

    def _use(self, workspace_bytes: int) -> None:
        resident_bytes = self.changes[-1].resident_bytes if self.changes else 0
        self.max_used_bytes = max(self.max_used_bytes, resident_bytes + workspace_bytes)

    def per_query(self) -> list[dict[str, Any]]:
        """Per query: id, received, processed, late, dropped (in all), dropped_by reason, and age_p95_ms of its results
        (None if none).
        """
        ages: dict[str, list[float]] = {}
        for frame in self.frames:
            if frame.finished_at is not None:
                ages.setdefault(frame.query, []).append(frame.finished_at - frame.captured_at)
        return [
            {
                "id": row["query"], "received": row["received"], "processed": row["processed"], "late": row["late"],
                "dropped": sum(row["dropped"].values()), "dropped_by": row["dropped"],
                "age_p95_ms": age_p95_ms(ages.get(row["query"], ())),
            }
            for row in self.ledger.to_json()
        ]  # fmt: skip


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
    specs: Mapping[str, QuerySpec] | None = None,
    until_s: float = math.inf,
) -> Simulation:
    """Run the schedule over frames captured at the given times (seconds, ascending per query).

    Starts with nothing resident and ends when every frame is settled, or starts nothing more at `until_s`; frames
    then waiting or yet to come by `until_s` stay pending. Runs take exactly what `costs` says; loads and runs do not
    overlap. `specs` follow from the arrivals unless given. Same input, same result.
    """
    unknown = set(arrivals) - set(costs.queries)
    if unknown:
        raise ValueError(f"frames arrive for queries without costs: {sorted(unknown)}")
    seen = policy.view(costs)
    wanted = {query: QuerySpec(arrival_rate(arrivals.get(query, ()))) for query in costs.queries} | dict(specs or {})
    settled = policy.plan(seen, wanted, budget_bytes)
    simulation = Simulation(seen)
    feed = sorted((at, query, at) for query, times in arrivals.items() for at in times if at <= until_s)
    box = VirtualBox(seen, lambda state: policy.decide(state, seen, settled), simulation, feed)
    while box.now < until_s and box.step(until_s):
        pass
    box.deliver(until_s)
    return simulation


def arrival_rate(times: Sequence[float]) -> float:
    """Frames per second of arrivals; 1 where there are too few to tell."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 1.0
