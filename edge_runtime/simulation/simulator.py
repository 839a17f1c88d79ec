"""The schedule on a virtual clock: what would become of every frame, without a device.

`VirtualBox` is the one event loop: `simulate` plays frames to their end with it, `replay` feeds it a recorded run, and
`edge_runtime.policies.selection` compares policies with it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.queues import DEPTH, REPLACED, Ledger
from edge_runtime.scheduler import CLOCK_SLACK_S, Decision, Plan, Policy, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs

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
    urgency: Mapping[str, float] | None = None
    fed: int = 0
    waiting: dict[str, tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        self.waiting = dict(self.waiting or {})

    def fork(self, decide: Decide, observer: BoxObserver, policy_state: Any = None) -> VirtualBox:
        """The same box at this moment under another policy."""
        return replace(self, decide=decide, observer=observer, policy_state=policy_state)

    def play(self, until_s: float = math.inf) -> None:
        """Go on until every frame is settled, or start nothing more at `until_s`."""
        while self.now < until_s and self.step(until_s):
            pass
        self.deliver(until_s)

    def step(self, until_s: float = math.inf) -> bool:
        """One decision and what it takes, or a sleep; False when there is nothing left to wait for."""
        self.deliver(until_s)
        decision = self.next_decision()
        for query, captured_at, reason in decision.drop:
            self.drop(query, captured_at, reason)
        if decision.query is None:
            return self.sleep(decision.wake_s)
        if decision.evict or decision.load:
            self.now += self.costs.load_s(self.change_resident(decision))
            self.observer.on_load(self, decision)
        if decision.count:
            started_at = self.now
            self.now += self.costs.queries[decision.query].run_of(decision.count)
            captured = self.take(decision.query, decision.count)
            assert len(captured) == decision.count, "the schedule ran frames that do not wait"
            self.observer.on_run(decision.query, captured, started_at, self.now)
        return True

    def deliver(self, until_s: float = math.inf) -> None:
        """Put every frame that came by now into its mailbox; a full mailbox drops its oldest frame."""
        assert self.waiting is not None
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
        assert self.waiting is not None
        state = SchedulerState(
            self.now, self.waiting, self.resident, self.resident_bytes, self.policy_state, self.urgency or {}
        )
        decision = self.decide(state)
        self.policy_state = decision.policy_state
        return decision

    def change_resident(self, decision: Decision) -> int:
        """Evict and load; the bytes that the load moves."""
        self.resident = self.resident.difference(decision.evict).union(decision.load)
        self.resident_bytes += self.costs.resident_bytes(decision.load) - self.costs.resident_bytes(decision.evict)
        return self.costs.moved_bytes(decision.load)

    def sleep(self, wake_s: float | None) -> bool:
        """Move the clock to the next frame, or to when the policy wants to be called again; False when neither is."""
        upcoming = [self.feed[self.fed][0]] if self.fed < len(self.feed) else []
        if wake_s is not None and wake_s > self.now and (upcoming or self.waiting):
            upcoming.append(wake_s)
        self.now = min(upcoming, default=self.now)
        return bool(upcoming)

    def drop(self, query: str, captured_at: float, reason: str) -> None:
        """Drop a waiting frame; nothing where it does not wait any more."""
        held = (self.waiting or {}).get(query, ())
        if captured_at in held:
            position = held.index(captured_at)
            self._keep(query, held[:position] + held[position + 1 :])
            self.observer.on_drop(query, position, reason)

    def take(self, query: str, count: int) -> tuple[float, ...]:
        """Remove up to `count` of a query's oldest frames."""
        held = (self.waiting or {}).get(query, ())
        self._keep(query, held[count:])
        return held[:count]

    def _keep(self, query: str, held: tuple[float, ...]) -> None:
        assert self.waiting is not None
        if held:
            self.waiting[query] = held
        else:
            self.waiting.pop(query, None)


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
    specs: Mapping[str, QuerySpec] | None = None,
    plan: Plan | None = None,
    until_s: float = math.inf,
) -> Simulation:
    """Run the schedule over frames captured at the given times (seconds, ascending per query).

    Starts with nothing resident and ends when every frame is settled, or starts nothing more at `until_s`; frames
    then waiting or yet to come by `until_s` stay pending. Runs take exactly what `costs` says; loads and runs do not
    overlap. `specs` follow from the arrivals unless given; `plan` is made by the policy unless given. Same input,
    same result.
    """
    unknown = set(arrivals) - set(costs.queries)
    if unknown:
        raise ValueError(f"frames arrive for queries without costs: {sorted(unknown)}")
    seen = policy.view(costs)
    wanted = {query: QuerySpec(arrival_rate(arrivals.get(query, ()))) for query in costs.queries} | dict(specs or {})
    settled = plan or policy.plan(seen, wanted, budget_bytes)
    recorder = _Recorder(seen)
    feed = sorted((at, query, at) for query, times in arrivals.items() for at in times if at <= until_s)
    VirtualBox(seen, lambda state: policy.decide(state, seen, settled), recorder, feed).play(until_s)
    return recorder.simulation()


def arrival_rate(times: Sequence[float]) -> float:
    """Frames per second of arrivals; 1 where there are too few to tell."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 1.0


class _Recorder(BoxObserver):
    """Notes the outcome of every frame and every change of memory."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._ledger = costs, Ledger(costs.queries)
        self._outcomes: list[FrameOutcome] = []
        self._waiting: dict[str, list[int]] = {query: [] for query in costs.queries}
        self._counts = dict.fromkeys(costs.queries, 0)
        self._changes: list[Swap] = []
        self._bytes_moved = self._max_used_bytes = self._resident_bytes = 0

    def on_arrival(self, query: str, captured_at: float) -> None:
        self._waiting[query].append(len(self._outcomes))
        self._outcomes.append(FrameOutcome(query, self._counts[query], captured_at))
        self._counts[query] += 1
        self._ledger.count_received(query)

    def on_drop(self, query: str, position: int, reason: str) -> None:
        place = self._waiting[query].pop(position)
        self._outcomes[place] = replace(self._outcomes[place], outcome=DROPPED, reason=reason)
        self._ledger.count_dropped(query, reason)

    def on_load(self, box: VirtualBox, decision: Decision) -> None:
        query = str(decision.query)
        self._bytes_moved += self._costs.moved_bytes(decision.load)
        self._resident_bytes = box.resident_bytes
        self._changes.append(Swap(box.now, query, decision.evict, decision.load, box.resident_bytes))
        self._use(query, max(1, decision.count))

    def on_run(self, query: str, captured: Sequence[float], started_at: float, finished_at: float) -> None:
        self._use(query, len(captured))
        sla_s = self._costs.queries[query].sla_s
        for captured_at in captured:
            place = self._waiting[query].pop(0)
            late = finished_at - captured_at > sla_s + CLOCK_SLACK_S
            self._outcomes[place] = replace(
                self._outcomes[place], started_at=started_at, finished_at=finished_at, outcome=PROCESSED, late=late
            )
            self._ledger.count_processed(query, late)

    def simulation(self) -> Simulation:
        """What was noted."""
        swaps = sum(bool(change.loaded) for change in self._changes)
        return Simulation(
            tuple(self._outcomes), self._bytes_moved, swaps, self._max_used_bytes, tuple(self._changes), self._ledger,
            self._costs,
        )  # fmt: skip

    def _use(self, query: str, count: int) -> None:
        workspace_bytes = self._costs.queries[query].workspace_of(count)
        self._max_used_bytes = max(self._max_used_bytes, self._resident_bytes + workspace_bytes)
