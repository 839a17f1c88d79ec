"""A virtual box: what a way of deciding makes of frames, on a clock of its own, as far as it is asked to go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.frames.mailbox import DEPTH
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Situation

Decide = Callable[[Situation], Decision]


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
    recall: Any = None
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
            self.now, self.recall, self.resident, self.resident_bytes, dict(self.waiting), list(self.coming),
            dict(self.served), self.urgency, dict(self.answers),
        )  # fmt: skip

    def recounted(self) -> VirtualBox:
        """A copy that counts from now on."""
        box = self.copied()
        box.served = {}
        return box

    def told(self, waiting: Mapping[str, Sequence[float]], newest: Mapping[str, float]) -> dict[str, float]:
        """Expect those of the frames that wait elsewhere which are newer than the `newest` it was told of; the newest
        of each query after that.
        """
        known = {query: newest.get(query, float("-inf")) for query in waiting}
        self.expect((one, query) for query, captured in waiting.items() for one in captured if one > known[query])
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
            situation = Situation(self.now, self.waiting, self.resident, self.resident_bytes, self.recall, self.urgency)
            decision = decide(situation)
            self.recall = decision.recall
            for query, captured_at, _ in decision.drop:
                self._take(query, self.waiting[query].index(captured_at), 1)
            if decision.turn is not None:
                self._carry_out(decision, decision.turn, costs)
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
