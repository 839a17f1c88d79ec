"""Giving jobs to several workers: results come in order, and a worker that dies on the way loses nothing.

Whoever dies with a job leaves it to another; a job that two died of, or that fails, is left to the main process, which
has all the memory to itself by then and shows an error with its whole trace.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from merger.journal.progress import Progress
from merger.workers.jobs import Arrived, Done, Job, Order, Results
from models.errors import InputError

MOST_DEATHS = 2


@dataclass(frozen=True)
class Told:
    """A worker's progress: an event and its fields."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Lost:
    """A worker is no more, and why."""

    why: str


@dataclass(frozen=True)
class Failed:
    """A worker could not do its job, and why."""

    why: str


News = Told | Done | InputError | Failed | Lost


class Hand(Protocol):
    """One worker, with at most one job at a time."""

    name: str

    def begin(self, job: Job, order: Order) -> None:
        """Give it a job; OSError when it can't be given."""
        ...

    def end(self) -> None:
        """End it now, whatever it does."""
        ...


class Crew(Protocol):
    """Where workers come from."""

    def hire(self) -> Hand | None:
        """One more worker; None when there can be none."""
        ...

    def wait(self, busy: Sequence[Any]) -> tuple[Hand, News]:
        """The next news of one of these."""
        ...

    def close(self) -> None:
        """Nobody is needed any more; every hand has been ended."""
        ...


class Pool:
    """At most `count` workers of a crew, hired when there is something to do for them (merger.workers.jobs.Workers)."""

    def __init__(self, crew: Crew, count: int, progress: Progress) -> None:
        self.crew, self.count, self.progress = crew, count, progress
        self.hands: list[Hand] = []

    def map(self, jobs: Sequence[Job], order: Order, arrived: Arrived) -> Results:
        """See `Workers.map`."""
        batch = _Batch(self, jobs, order, arrived)
        try:
            for job in jobs:
                yield batch.result(job.name)
        finally:
            batch.stop()

    def close(self) -> None:
        """End all workers."""
        while self.hands:
            self.hands.pop().end()
        self.crew.close()


class _Batch:
    """Jobs that are done beside each other."""

    def __init__(self, pool: Pool, jobs: Sequence[Job], order: Order, arrived: Arrived) -> None:
        self._pool, self._order, self._arrived = pool, order, arrived
        self._queue = deque(jobs)
        self._busy: dict[int, tuple[Hand, Job]] = {}
        self._found: dict[str, Done | InputError | None] = {}
        self._deaths: Counter[str] = Counter()

    def result(self, name: str) -> Done | None:
        """Wait for this job; an error of it is raised here, when its turn has come."""
        while name not in self._found:
            self._give_out()
            if self._busy:
                self._hear(*self._pool.crew.wait([hand for hand, _ in self._busy.values()]))
        found = self._found[name]
        if isinstance(found, InputError):
            raise found
        return found

    def stop(self) -> None:
        """End who is still at work: nobody waits for it."""
        for hand, _ in self._busy.values():
            hand.end()
            self._pool.hands.remove(hand)
        self._busy.clear()

    def _give_out(self) -> None:
        """Give every idle worker a job; with no worker left, the next job is for the main process."""
        while self._queue and (hand := self._idle()) is not None:
            job = self._queue.popleft()
            try:
                hand.begin(job, self._order)
            except OSError as error:
                self._lost(hand, job, f"cannot be given a job: {error}")
                continue
            self._busy[id(hand)] = (hand, job)
        if self._queue and not self._busy:
            self._found[self._queue.popleft().name] = None

    def _idle(self) -> Hand | None:
        for hand in self._pool.hands:
            if id(hand) not in self._busy:
                return hand
        if len(self._pool.hands) < self._pool.count and (hired := self._pool.crew.hire()) is not None:
            self._pool.hands.append(hired)
            return hired
        return None

    def _hear(self, hand: Hand, news: News) -> None:
        if isinstance(news, Told):
            self._pool.progress(news.event, **news.fields)
            return
        _, job = self._busy.pop(id(hand))
        if isinstance(news, Lost):
            self._lost(hand, job, news.why)
            return
        if isinstance(news, Failed):
            self._warn(hand, news.why, job, "the main process does it")
            self._found[job.name] = None
            return
        self._found[job.name] = news
        if isinstance(news, Done):
            self._arrived(job.name, news)

    def _lost(self, hand: Hand, job: Job, why: str) -> None:
        hand.end()
        self._pool.hands.remove(hand)
        self._deaths[job.name] += 1
        again = self._deaths[job.name] < MOST_DEATHS
        self._warn(hand, why, job, "another worker does it" if again else "the main process does it")
        if again:
            self._queue.appendleft(job)
        else:
            self._found[job.name] = None

    def _warn(self, hand: Hand, why: str, job: Job, then: str) -> None:
        self._pool.progress("warning", text=f"{hand.name} {why} at '{job.name}': {then}")
