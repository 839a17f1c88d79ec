"""The trial: the free choice rehearsed, against the paper's schedule on the same frames."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.policies.against.expected import expected
from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.free import freely
from edge_runtime.policies.trying import HORIZON_S
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import Decision, Plan, SchedulerState

# What the free choice must bring of each query's frames, of those that the paper's schedule brings, but so many.
QUERY_SHARE, QUERY_SLACK = 0.85, 1.5
# How far it may then fall behind, in sum and with any query, as a share of what the paper's schedule has brought since,
# or brings in so many trials' length, or (a query) of so many frames: what it catches up with.
SUM_LOST, QUERY_LOST, TRIALS, FEWEST = 0.015, 0.15, 3, 20


class Trial:
    """Begun in a situation, and played a few decisions at a time, so that no real one waits long for it.

    It is played as far as it was ever asked for, and says the same whenever it is asked with as many steps. Where the
    box follows the paper's schedule, that is played on for `lead_s` first: the free choice is rehearsed from the moment
    on, `begins`, at which it is to begin, not from one that is over when the trial is. Both schedules start there
    with nothing owed. `costs` are those it was begun with; `of_paper`, known once it is over, are the frames in time of
    each query by the paper's schedule.
    """

    def __init__(self, state: SchedulerState, book: Book, costs: Costs, plan: Plan, lead_s: float = 0.0) -> None:
        self.costs, self.begins = costs, state.now + lead_s
        self.of_paper: Mapping[str, float] = {}
        self._plan, self._book = plan, book
        self._ends = self.begins + HORIZON_S
        self._steps, self._kept = 0, False
        self._seen: list[Book] = []
        self._frames = expected(book.shadow.newest, plan.detail.demands, state.now, self._ends)
        self._leads = lead_s > 0
        if self._leads:
            self._box = book.shadow.box.copied()
        else:
            self._box = VirtualBox(
                state.now, book.opened(), frozenset(state.resident), state.resident_bytes,
                {query: tuple(captured) for query, captured in state.waiting.items()},
            )  # fmt: skip
        self._box.urgency = state.urgency
        self._box.expect(self._frames)

    def passed(self, steps: int) -> bool | None:
        """Whether the free choice keeps the promise; None where more steps are needed to tell."""
        while self._box.now < self._ends and self._steps < steps:
            if self._leads and self._box.now >= self.begins:
                self._go_over()
            self._box.step(self.begins if self._leads else self._ends, self.costs, self._decide)
            self._steps += 1
            if self._box.now >= self._ends:
                self._kept = not self._leads and self._judged()
        return None if self._box.now < self._ends or self._steps > steps else self._kept

    def _go_over(self) -> None:
        """The paper's schedule has been played as far as to where the free choice begins."""
        self._leads, self.begins = False, self._box.now
        shadow = self._box.recounted()
        shadow.coming = [(at, query) for at, query in shadow.coming if at <= self.begins]
        come = {query: at for at, query in sorted(self._frames) if at <= self.begins}
        newest = {**self._book.shadow.newest, **come}
        answered = {query: answer.captured for query, answer in self._box.answers.items()}
        self._box.policy_state = Book(Shadow(shadow, newest), captured={**self._book.captured, **answered})

    def _decide(self, state: SchedulerState) -> Decision:
        reference: Reference = self._plan.detail.reference
        if self._leads:
            return reference.decide(state, self.costs)
        book: Book = state.policy_state
        self._seen.append(book.seen(state, self.costs, reference))
        return freely(state, self.costs, self._plan, self._seen[-1])

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

    def _judged(self) -> bool:
        """More in sum, and no query much worse off, once the shadow has come as far; and never so far behind on the way
        that the free choice would be given up.
        """
        book: Book = self._box.policy_state
        ended = SchedulerState(self._box.now, self._box.waiting, self._box.resident, self._box.resident_bytes)
        book = book.seen(ended, self.costs, self._plan.detail.reference)
        self.of_paper = book.shadow.served
        seen, self._seen = self._seen, []
        return (
            self._in_sum(book.ran) > self._in_sum(self.of_paper)
            and all(book.of(query) >= QUERY_SHARE * count - QUERY_SLACK for query, count in self.of_paper.items())
            and all(map(self.bears, seen))
        )

    def _in_sum(self, counts: Mapping[str, float]) -> float:
        return sum(count * self._plan.detail.demands[query].urgency for query, count in counts.items())
