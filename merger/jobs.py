"""Independent parts of a merge: one after the other in one process, or spread over the ranks of a process group.

A job is a pure function of the merge context and of plain values, so it may run on any rank; its result is a step of
the cache. With several ranks an interruption repeats the jobs that ran beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from merger.checkpoint import FlopMeter, StepCache
from merger.distributed import ProcessGroup


@dataclass(frozen=True)
class Job:
    """`do(ctx, cache, **given)` under a name; with one query in `queries` it runs on the rank of that query."""

    name: str
    do: Callable[..., Any]
    given: Mapping[str, Any]
    queries: tuple[str, ...] = ()


class JobContext(Protocol):
    """What running jobs needs of a context; `merger.context.MergeContext` is one."""

    group: ProcessGroup

    @property
    def flops(self) -> FlopMeter:
        """Counts the FLOPs of this rank."""
        ...

    def gather(self, compute: Callable[[], Mapping[str, Any]], /) -> dict[str, Any]:
        """The results of all ranks by name, each computed alone."""
        ...


def run_jobs(ctx: JobContext, cache: StepCache, name: str, jobs: Sequence[Job]) -> list[Any]:
    """The results of the jobs, in order: a step of the cache as a whole and, in one process, each."""

    def run_all() -> list[Any]:
        size = ctx.group.size
        if size == 1:
            return [cache.step(job.name, partial(job.do, ctx, cache, **job.given)) for job in jobs]
        cache.step("begun", lambda: None)  # FLOPs of jobs that an interruption cut short are not counted
        ranks = [
            ctx.group.owner(job.queries[0]) if len(job.queries) == 1 else index % size for index, job in enumerate(jobs)
        ]
        own = [job for job, rank in zip(jobs, ranks, strict=True) if rank == ctx.group.rank]
        found = ctx.gather(lambda: {job.name: job.do(ctx, _memory_cache(ctx), **job.given) for job in own})
        return [found[job.name] for job in jobs]

    return cache.step(name, run_all)


def _memory_cache(ctx: JobContext) -> StepCache:
    cache = StepCache()
    cache.meter = ctx.flops
    return cache


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Use this many torch threads within; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
