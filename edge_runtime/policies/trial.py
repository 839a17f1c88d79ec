"""The trial: the free choice rehearsed from the present moment on, against the paper's schedule on the same frames."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.free import freely
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Plan, Situation

HORIZON_S = 10.0
# A query of which nothing was heard for so many periods is expected to stay silent.
SILENT_PERIODS = 3.0
# What the free choice must bring of each query's frames, of those that the paper's schedule brings, but so many.
QUERY_SHARE, QUERY_SLACK = 0.85, 1.5
# How far it may then fall behind, in sum and with any query, as a share of what the paper's schedule has brought since,
# or brings in so many trials' length, or (a query) of so many frames: what it catches up with.
SUM_LOST, QUERY_LOST, TRIALS, FEWEST = 0.015, 0.15, 3, 20


class Trial:
    """Begun in a situation, and played a few decisions at a time, so that no real one waits long for it.

    It is played as far as it was ever asked for, and says the same whenever it is asked with as many steps. Both
    schedules start with nothing owed. `costs` are those it was begun with; `of_paper`, known once it is over, are the
    frames in time of each query by the paper's schedule.
    """

    def __init__(self, situation: Situation, book: Book, costs: Costs, plan: Plan) -> None:
        self.costs = costs
        self.of_paper: Mapping[str, float] = {}
        self._plan = plan
        self._ends = situation.now + HORIZON_S
        self._steps = 0
        self._box = VirtualBox(
            situation.now, book.opened(), frozenset(situation.resident), situation.resident_bytes,
            {query: tuple(captured) for query, captured in situation.waiting.items()}, urgency=situation.urgency,
        )  # fmt: skip
        self._box.expect(self._frames(situation.now, book.shadow.newest))

    def passed(self, steps: int) -> bool | None:
        """Whether the free choice keeps the promise; None where more steps are needed to tell."""
        while self._box.now < self._ends and self._steps < steps:
            self._box.step(self._ends, self.costs, self._decide)
            self._steps += 1
        if self._box.now < self._ends or self._steps > steps:
            return None
        return self._kept()

    def _frames(self, now: float, newest: Mapping[str, float]) -> list[tuple[float, str]]:
        """What will come if every query that was heard of lately goes on at its rate."""
        frames = []
        for query, captured_at in newest.items():
            period = 1 / self._plan.detail.demands[query].fps
            if now - captured_at > SILENT_PERIODS * period:
                continue
            count = int((self._ends - captured_at) / period)
            times = [captured_at + index * period for index in range(1, count + 1)]
            frames += [(at, query) for at in times if now < at < self._ends]
        return frames

    def _decide(self, situation: Situation) -> Decision:
        book: Book = situation.recall
        return freely(situation, self.costs, self._plan, book.seen(situation, self.costs, self._plan.detail.reference))

    def bears(self, book: Book) -> bool:
        """Whether the free choice, since the book was opened, is near enough to the paper's schedule.

        What the trial brought both of them in sum or of a query says how much it may be behind and catch up.
        """
        served = book.shadow.served
        in_sum, by_trial = self._in_sum(served), TRIALS * self._in_sum(self.of_paper)
        return in_sum - self._in_sum(book.ran) <= max(SUM_LOST * max(in_sum, by_trial), 1.0) and all(
            count - book.of(query) <= QUERY_LOST * max(count, TRIALS * self.of_paper.get(query, 0), FEWEST)
            for query, count in served.items()
        )

    def _kept(self) -> bool:
        """More in sum, and no query much worse off, once the shadow has come as far."""
        book: Book = self._box.recall
        ended = Situation(self._box.now, self._box.waiting, self._box.resident, self._box.resident_bytes)
        book = book.seen(ended, self.costs, self._plan.detail.reference)
        self.of_paper = book.shadow.served
        return self._in_sum(book.ran) > self._in_sum(self.of_paper) and all(
            book.of(query) >= QUERY_SHARE * count - QUERY_SLACK for query, count in self.of_paper.items()
        )

    def _in_sum(self, counts: Mapping[str, float]) -> float:
        return sum(count * self._plan.detail.demands[query].urgency for query, count in counts.items())
