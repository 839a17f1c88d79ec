"""Independent pieces of a merge: done one after the other, or side by side by workers, with the same outcome.

A job is a pure function of a workbench and of plain values and tensors, so it may run anywhere. Its result is a step
of the journal and its work is added when its turn comes: neither depends on who did it, nor on what ended first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from merger.checkpoint import Meter, StepCache
from merger.distributed import SINGLE_PROCESS, ProcessGroup
from merger.training.step_config import MemoryPlan

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
    flops: float


@dataclass(frozen=True)
class Order:
    """How the jobs beside each other are to be done: torch threads for each, the precision of every training, and how
    its steps are laid out (merger.training.step_config.MemoryPlan).
    """

    threads: int
    precisions: Mapping[str, str]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a merge may use: torch threads (None: as many as torch takes), and the address of a Ray cluster.

    With `threads`, every training of the merge uses so many: then its outcome is the same bit by bit with a cluster of
    any size and with none. `ray` is what ray.init takes; `local` starts Ray on this machine. `crew` are the processes
    that torchrun started (merger.distributed).
    """

    threads: int | None = None
    ray: str | None = None
    crew: ProcessGroup = SINGLE_PROCESS


@dataclass(frozen=True)
class Threads:
    """How many torch threads a merge uses: `main` where it trains alone, `jobs` in each of several jobs.

    Training rounds differently with another number of threads, so both are kept in the checkpoint.
    """

    main: int
    jobs: int


class Workers(Protocol):
    """Who does jobs beside the main process; `does_all`: also those that are not worth sending."""

    does_all: bool

    def do(self, jobs: Sequence[Job], order: Order, arrived: Callable[[Job, Done], None]) -> None:
        """Do these jobs; `arrived` hears of each that is done, and the main process does what it has not heard of."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Employer(Protocol):
    """What is asked of a workbench whose jobs are done; `merger.core.context.Workbench` is one."""

    workers: Workers | None
    threads: Threads

    fitting: MemoryPlan

    @property
    def flops(self) -> Meter:
        """What counts the work."""
        ...

    def settled(self, queries: Collection[str], /) -> Mapping[str, str]:
        """The precision in which each of these queries is trained."""
        ...


def run_jobs(ctx: Employer, journal: StepCache, name: str, jobs: Sequence[Job]) -> list[Any]:
    """The results of the jobs in order, a step of the journal as a whole and each."""
    return journal.step(name, partial(_run, ctx, journal, jobs))


def _run(ctx: Employer, journal: StepCache, jobs: Sequence[Job]) -> list[Any]:
    arrived: dict[str, tuple[Any, float]] = journal.state("arrived")
    # Back to the work as it was before: what was half done of a job here counts for nothing when a worker does it.
    journal.step("begun", lambda: None)
    # Not whether workers are there decides on the threads, or the outcome would depend on it.
    spread = len(jobs) > 1 and sum(job.flops for job in jobs) >= WORTH_SENDING
    threads = ctx.threads.jobs if spread else ctx.threads.main
    precisions = ctx.settled({query for job in jobs for query in job.trains})
    order = Order(threads, precisions, ctx.fitting.to_plain())

    def note(job: Job, done: Done) -> None:
        arrived[job.name] = (done.value, done.flops)
        journal.maybe_save()

    if ctx.workers is not None and (spread or ctx.workers.does_all):
        left = [job for job in jobs if job.name not in arrived and not journal.has_done(job.name)]
        ctx.workers.do(left, order, note)
    return [journal.step(job.name, partial(_result, ctx, journal, job, order, arrived)) for job in jobs]


def _result(ctx: Employer, journal: StepCache, job: Job, order: Order, arrived: dict[str, tuple[Any, float]]) -> Any:
    if job.name in arrived:
        value, flops = arrived.pop(job.name)
        ctx.flops.total += flops
        return value
    with torch_threads(order.threads):
        return job.do(ctx, journal, **job.given)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many torch threads within."""
    before = torch.get_num_threads()
    if threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads != before:
            torch.set_num_threads(before)
