"""The schedule on a virtual clock: what would become of every frame, without a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.costs import Costs
from edge_runtime.ledger import REPLACED, Ledger
from edge_runtime.mailbox import Frame, Mailboxes
from edge_runtime.schedule import CLOCK_SLACK_S, Decision, Situation, Turns, decide, share_order

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
    """The outcome of a simulation. `bytes_moved` counts stored bytes loaded, `swaps` the loads that moved any."""

    frames: tuple[FrameOutcome, ...]
    bytes_moved: int
    swaps: int
    max_used_bytes: int
    changes: tuple[Swap, ...]
    ledger: Ledger

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
        return [{"id": account["query"], "received": account["received"], "processed": account["processed"],
                 "late": account["late"], "dropped": sum(account["dropped"].values()),
                 "age_p95_ms": age_p95_ms(ages.get(account["query"], ()))} for account in self.ledger.to_json()]


def age_p95_ms(ages_s: Iterable[float]) -> float | None:
    """The 95th percentile (nearest rank) of ages in seconds, in milliseconds; None of none."""
    ordered = sorted(ages_s)
    return round(1000 * ordered[math.ceil(0.95 * len(ordered)) - 1], 3) if ordered else None


def simulate(costs: Costs, arrivals: Mapping[str, Sequence[float]], budget_bytes: int,
             order: Sequence[str] | None = None, until_s: float = math.inf) -> Simulation:
    """Run the schedule over frames captured at the given times (seconds, ascending per query).

    Starts with nothing resident and ends when every frame is settled, or starts nothing more at `until_s`; frames
    then waiting or yet to come by `until_s` stay pending. Runs take exactly what `costs` says; loads and runs do not
    overlap. Same input, same result.
    """
    return _Box(costs, arrivals, budget_bytes, order or share_order(costs), until_s).play()


class _Box:
    """The virtual box: applies decisions to a clock that only they and the arrivals move."""

    def __init__(self, costs: Costs, arrivals: Mapping[str, Sequence[float]], budget_bytes: int,
                 order: Sequence[str], until_s: float) -> None:
        unknown = set(arrivals) - set(costs.queries)
        if unknown:
            raise ValueError(f"frames arrive for queries without costs: {sorted(unknown)}")
        self.costs, self.budget_bytes, self.order, self.until_s = costs, budget_bytes, order, until_s
        self.feed = sorted((at, query, index) for query, times in arrivals.items()
                           for index, at in enumerate(times) if at <= until_s)
        self.fed = 0
        self.ledger = Ledger(costs.queries)
        self.mailboxes = Mailboxes(costs.queries, self.ledger)
        self.now = 0.0
        self.turns = Turns()
        self.resident: set[str] = set()
        self.resident_bytes = self.bytes_moved = self.max_used_bytes = 0
        self.changes: list[Swap] = []
        self.outcomes: dict[tuple[str, int], FrameOutcome] = {}

    def play(self) -> Simulation:
        while self.now < self.until_s:
            self.deliver()
            situation = Situation(self.now, self.mailboxes.pending(), self.resident, self.turns)
            decision = decide(situation, self.costs, self.budget_bytes, self.order)
            for query, reason in decision.drop:
                frame = self.mailboxes.drop(query, situation.pending[query], reason)
                self.settle_dropped(query, frame, reason)
            if decision.turn is not None:
                self.carry_out(decision, decision.turn)
            elif self.fed < len(self.feed):
                self.now = self.feed[self.fed][0]
            else:
                break
            self.turns = self.turns.after(decision)
        self.deliver()
        swaps = sum(bool(change.loaded) for change in self.changes)
        return Simulation(tuple(self.outcomes[query, index] for _, query, index in self.feed), self.bytes_moved, swaps,
                          self.max_used_bytes, tuple(self.changes), self.ledger)

    def deliver(self) -> None:
        """Put every frame captured by now into its mailbox."""
        while self.fed < len(self.feed) and self.feed[self.fed][0] <= min(self.now, self.until_s):
            at, query, index = self.feed[self.fed]
            self.fed += 1
            self.outcomes[query, index] = FrameOutcome(query, index, at)
            self.settle_dropped(query, self.mailboxes.put(query, Frame(index, at)), REPLACED)

    def settle_dropped(self, query: str, frame: Frame | None, reason: str) -> None:
        if frame is not None:
            self.outcomes[query, frame.index] = FrameOutcome(query, frame.index, frame.captured_at, outcome=DROPPED,
                                                             reason=reason)

    def carry_out(self, decision: Decision, query: str) -> None:
        cost = self.costs.queries[query]
        if decision.evict or decision.load:
            self.resident.difference_update(decision.evict)
            self.resident.update(decision.load)
            self.resident_bytes += (self.costs.resident_bytes(decision.load)
                                    - self.costs.resident_bytes(decision.evict))
            moved = self.costs.moved_bytes(decision.load)
            self.bytes_moved += moved
            self.now += self.costs.load_s(moved)
            self.changes.append(Swap(self.now, query, decision.evict, decision.load, self.resident_bytes))
        self.max_used_bytes = max(self.max_used_bytes, self.resident_bytes + cost.workspace_bytes)
        if decision.run:
            self.run(query, cost.run_s, cost.sla_s)

    def run(self, query: str, run_s: float, sla_s: float) -> None:
        """Run the newest frame, which may have arrived during the load."""
        self.deliver()
        frame = self.mailboxes.take(query)
        assert frame is not None, "the schedule ran a query without a frame"
        started = self.now
        self.now += run_s
        late = self.now - frame.captured_at > sla_s + CLOCK_SLACK_S
        self.ledger.processed(query, late)
        self.outcomes[query, frame.index] = FrameOutcome(query, frame.index, frame.captured_at, started, self.now,
                                                         PROCESSED, late=late)
