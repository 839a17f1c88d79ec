"""A virtual box: what a way of deciding makes of frames, on a clock of its own, as far as it is asked to go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.queues import DEPTH
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, QuerySpec, SchedulerState

Decide = Callable[[SchedulerState], Decision]
# No box is busy for longer: where nothing came for so long, nothing was lost.
BUSY_MOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a frame: when that was captured, and when the answer is there."""

    captured: float
    finishes: float


@dataclass(slots=True)
class VirtualBox:
    """A box in thought: its clock, memory, queues, and what its policy recalls; `coming` frames are in order.

    Loads and runs take what the costs say, one after the other. `served` counts the frames run of each query;
    `answers` has its newest one.
    """

    now: float
    policy_state: Any = None
    resident: frozenset[str] = frozenset()
    resident_bytes: int = 0
    waiting: dict[str, tuple[float, ...]] = field(default_factory=dict)
    coming: list[tuple[float, str]] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    urgency: Mapping[str, float] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def copied(self) -> VirtualBox:
        """Another box in the same state, which goes its own way."""
        return VirtualBox(
            self.now, self.policy_state, self.resident, self.resident_bytes, dict(self.waiting), list(self.coming),
            dict(self.served), self.urgency, dict(self.answers),
        )  # fmt: skip

    def recounted(self) -> VirtualBox:
        """A copy that counts from now on."""
        box = self.copied()
        box.served = {}
        return box

    def told(
        self, waiting: Mapping[str, Sequence[float]], newest: Mapping[str, float], demands: Mapping[str, QuerySpec]
    ) -> dict[str, float]:
        """Expect the frames that wait elsewhere and are newer than the `newest` it was told of, and those before them
        that a full mailbox lost (`_lost`); the newest of each query after that.
        """
        known = {query: newest.get(query, float("-inf")) for query in waiting}
        for query, captured in waiting.items():
            new = [one for one in captured if one > known[query]]
            lost = _lost(known[query], new[0], demands[query].fps) if len(new) == DEPTH else []
            self.expect((one, query) for one in (*lost, *new))
        return {**newest, **{query: max(known[query], captured[-1]) for query, captured in waiting.items()}}

    def expect(self, frames: Iterable[tuple[float, str]]) -> None:
        """Frames (captured_at, query) that come, or came while nobody looked."""
        self.coming.extend(frames)
        self.coming.sort()

    def step(self, until: float, costs: Costs, decide: Decide) -> None:
        """One decision and what it takes, or a sleep until something comes."""
        arrived = 0
        for captured_at, query in self.coming:
            if captured_at > self.now:
                break
            self.waiting[query] = (*self.waiting.get(query, ()), captured_at)[-DEPTH:]
            arrived += 1
        del self.coming[:arrived]
        wake_s = until
        if self.waiting:
            state = SchedulerState(
                self.now, self.waiting, self.resident, self.resident_bytes, self.policy_state, self.urgency
            )
            decision = decide(state)
            self.policy_state = decision.policy_state
            for query, captured_at, _ in decision.drop:
                self._take(query, self.waiting[query].index(captured_at), 1)
            if decision.query is not None:
                self._carry_out(decision, decision.query, costs)
                return
            if decision.wake_s is not None and decision.wake_s > self.now:
                wake_s = min(until, decision.wake_s)
        self.now = min(wake_s, self.coming[0][0]) if self.coming else wake_s

    def _carry_out(self, decision: Decision, turn: str, costs: Costs) -> None:
        if decision.load or decision.evict:
            self.resident = self.resident.difference(decision.evict).union(decision.load)
            self.resident_bytes += costs.resident_bytes(decision.load) - costs.resident_bytes(decision.evict)
            self.now += costs.load_s(costs.moved_bytes(decision.load))
        if decision.count:
            self.now += costs.queries[turn].run_of(decision.count)
            captured = self.waiting[turn][: decision.count]
            self._take(turn, 0, decision.count)
            self.served[turn] = self.served.get(turn, 0) + decision.count
            self.answers[turn] = Answer(captured[-1], self.now)

    def _take(self, query: str, place: int, count: int) -> None:
        left = self.waiting[query][:place] + self.waiting[query][place + count :]
        if left:
            self.waiting[query] = left
        else:
            del self.waiting[query]


def _lost(known: float, first: float, fps: float) -> list[float]:
    """The frames that came between these two, at the query's rate, while a box was busy, and were pushed out of its
    mailbox by newer ones before they could be told of.
    """
    if first - known > BUSY_MOST_S:
        return []
    steps = max(1, round((first - known) * fps))
    return [known + (first - known) * step / steps for step in range(1, steps)]
