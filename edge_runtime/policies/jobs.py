"""Jobs: what could be run next, what each is worth, and which of them to give up when not all can be in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_runtime.scheduler.types import CLOCK_SLACK_S


@dataclass(frozen=True, slots=True)
class Job:
    """A load, if anything is `missing`, and a batch of `count` frames of one query that would be in time.

    `seconds` is what it takes, `deadline` that of its oldest frame, `per_frame` what a frame of it is worth.
    `density` is its worth per second, the reloading of what it evicts counted in.
    """

    query: str
    count: int
    missing: tuple[str, ...]
    load_s: float
    seconds: float
    deadline: float
    per_frame: float
    density: float


def in_time_together(now: float, jobs: Iterable[Job]) -> list[Job]:
    """The jobs to keep, in order of their deadlines, so that each is done by its own when run in this order.

    Moore (1968) and Hodgson: take jobs by deadline, and whenever they are too many for the time, give one up. With
    equal jobs, giving up the longest loses the fewest; here that with the least worth per second goes.
    """
    kept: list[Job] = []
    total_s = 0.0
    for job in sorted(jobs, key=lambda job: (job.deadline, job.query)):
        kept.append(job)
        total_s += job.seconds
        while kept and now + total_s > kept[-1].deadline + CLOCK_SLACK_S:
            least = min(kept, key=lambda job: (job.density, job.query))
            kept.remove(least)
            total_s -= least.seconds
    return kept


def frames_lost(seconds: float, rates: Sequence[tuple[str, float, float]], query: str) -> float:
    """Frames of other queries that come too late while the box is busy for `seconds` with `query`.

    `rates` holds (query, frames per second, seconds a frame can wait) of queries that are resident.
    """
    return sum(fps * (seconds - patience) for other, fps, patience in rates if other != query and seconds > patience)
