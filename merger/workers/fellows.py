"""The processes of a crew as workers: jobs that don't depend on each other, each where its query's frames are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from merger.checkpoint import StepCache
from merger.jobs import Done, Job, Order, torch_threads


class Fellows:
    """The crew of a workbench (merger.jobs.Workers): all processes call `do`, with the same jobs."""

    does_all = True

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def do(self, jobs: Sequence[Job], order: Order, arrived: Callable[[Job, Done], None]) -> None:
        """See `Workers.do`: each job is done once, by the process that has the query it trains, or by each in turns."""
        ctx = self._ctx
        mine = [job for place, job in enumerate(jobs) if self._rank(job, place) == ctx.crew.rank]
        before = ctx.flops.total
        found = ctx.everywhere(lambda: {job.name: self._done(job, order) for job in mine})
        ctx.flops.total = before  # each is counted when its turn comes
        for job in jobs:
            arrived(job, found[job.name])

    def close(self) -> None:
        """They stay."""

    def _rank(self, job: Job, place: int) -> int:
        return self._ctx.crew.owner(job.trains[0]) if len(job.trains) == 1 else place % self._ctx.crew.size

    def _done(self, job: Job, order: Order) -> Done:
        before, journal = self._ctx.flops.total, StepCache()
        journal.meter = self._ctx.flops
        with torch_threads(order.threads):
            value = job.do(self._ctx, journal, **job.given)
        return Done(value, self._ctx.flops.total - before)
