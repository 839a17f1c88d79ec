"""Independent pieces of a merge: done one after the other, or side by side by workers, with the same outcome.

A job is a pure function of a workbench and of plain values and tensors, so it may run anywhere. Its result is a step
of the journal and its work is added when its turn comes: neither depends on who did it, nor on what ended first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from merger.journal.steps import Journal

if TYPE_CHECKING:
    from merger.bench.workbench import Workbench

WORTH_SENDING = 5e11
"""FLOPs of jobs beside each other from which workers do them: to start one takes seconds, and models travel."""
Do = Callable[..., Any]
"""`do(bench, journal, **given)`, at the top of a module; returns plain values and tensors."""


@dataclass(frozen=True)
class Job:
    """One piece: its name among those beside it, what to do, and with what (plain values and tensors).

    `trains` are the queries whose models it trains (their precision is settled beforehand); `flops` is about what it
    takes, by which it is decided whether it is worth a worker.
    """

    name: str
    do: Do
    given: Mapping[str, Any]
    trains: tuple[str, ...] = ()
    flops: float = 0.0


@dataclass(frozen=True)
class Done:
    """What a worker brings: the job's result and the work it took (image passes x FLOPs)."""

    value: Any
    work: float


@dataclass(frozen=True)
class Order:
    """How the jobs beside each other are to be done: torch threads for each, and the precision of every training."""

    threads: int
    precisions: Mapping[str, str]


Arrived = Callable[[str, Done], None]
Results = Generator[Done | None, None, None]


class Workers(Protocol):
    """Who does jobs beside the main process."""

    def map(self, jobs: Sequence[Job], order: Order, arrived: Arrived) -> Results:
        """The results in the order of the jobs, None for one that the main process shall do.

        `arrived` hears of each at once. Who stops asking stops the jobs that are left.
        """
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Nobody:
    """No workers: the main process does every job."""

    def map(self, jobs: Sequence[Job], order: Order, arrived: Arrived) -> Results:
        """None for every job."""
        yield from (None for _ in jobs)

    def close(self) -> None:
        """There is nobody to end."""


@dataclass(frozen=True)
class Threads:
    """How many torch threads a merge uses: `main` where it trains alone, `jobs` in each of several jobs.

    Training rounds differently with another number of threads, so both are kept in the checkpoint. `jobs` None means:
    `main`, divided among as many jobs as run side by side at most (`at_once`).
    """

    main: int
    jobs: int | None = None
    at_once: int = 1

    def of(self, jobs: int) -> int:
        """Threads of each of so many jobs."""
        return self.jobs or max(1, self.main // max(1, min(self.at_once, jobs)))


def run(
    bench: Workbench, journal: Journal, name: str, jobs: Sequence[Job], until: Callable[[Any], bool] | None = None
) -> list[Any]:
    """The results of the jobs in order, a step of the journal as a whole and each.

    With `until`, only those up to the first of which it is true, as if one had been done after the other: others may
    have been begun where workers were idle, and count for nothing.
    """
    return journal.step(name, partial(_run, bench, journal, jobs, until))


def _run(bench: Workbench, journal: Journal, jobs: Sequence[Job], until: Callable[[Any], bool] | None) -> list[Any]:
    arrived: dict[str, tuple[Any, float]] = journal.part("arrived")
    # Back to the work as it was before: what was half done of a job here counts for nothing when a worker does it.
    journal.step("begun", lambda: None)
    # Not whether workers are there decides on the threads, or the outcome would depend on it.
    spread = len(jobs) > 1 and sum(job.flops for job in jobs) >= WORTH_SENDING
    workers = bench.workers if spread else Nobody()
    count = bench.threads.of(len(jobs)) if spread else bench.threads.main
    order = Order(count, bench.settled({query for job in jobs for query in job.trains}))
    values: list[Any] = []

    def note(name: str, done: Done) -> None:
        arrived[name] = (done.value, done.work)
        journal.tick()

    elsewhere: Results | None = None
    sent: list[Job] = []
    try:
        for place, job in enumerate(jobs):

            def do(job: Job = job, rest: Sequence[Job] = jobs[place:]) -> Any:
                nonlocal elsewhere
                if job.name not in arrived and elsewhere is None:
                    sent.extend(one for one in rest if one.name not in arrived)
                    elsewhere = workers.map(tuple(sent), order, note)
                # In step with what was sent, also where a result came before its turn.
                if elsewhere is not None and sent and sent[0] is job:
                    sent.pop(0)
                    if next(elsewhere) is None:
                        with threads(order.threads):
                            return job.do(bench, journal, **job.given)
                value, work = arrived.pop(job.name)
                bench.work.total += work
                return value

            values.append(journal.step(job.name, do))
            if until is not None and until(values[-1]):
                break
    finally:
        if elsewhere is not None:
            elsewhere.close()
    return values


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many torch threads within."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
