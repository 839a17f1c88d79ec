"""The choice: one situation as `adaptive` sees it, what could run in it and what that is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.policies.book import Book
from edge_runtime.policies.jobs import Job, frames_lost
from edge_runtime.queues import DEPTH
from edge_runtime.scheduler.batches import batch_in_time, too_late
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.eviction import pick_evictions
from edge_runtime.scheduler.types import Plan, QuerySpec, SchedulerState

# Owed so many frames, a query is loaded ahead of its next one when none that waits could be in time after the load.
LOAD_AHEAD_FROM = 0.5
# Owed so many frames, a query has others wait for its next one, if that could not be in time after theirs.
WAITED_FOR_FROM = 1.0
# How much more a frame is worth for each period of the query that its newest result is old, up to so many periods.
STALE_SHARE, STALE_PERIODS = 0.05, 20.0
# What takes no time at all counts as this many seconds, so that worth per second stays a number.
MIN_S = 1e-9


@dataclass(frozen=True, slots=True)
class Absent:
    """What of a query is not in memory: tensors in load order, seconds to load them, bytes they will occupy."""

    names: tuple[str, ...] = ()
    load_s: float = 0.0
    nbytes: int = 0


NOTHING = Absent()


@dataclass(frozen=True, slots=True)
class Ahead:
    """A load of what is `missing`, ahead of the query's next frame."""

    query: str
    missing: tuple[str, ...]
    evict: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The frames to run together, the older ones given up for them, and what must go from memory (captured_at)."""

    captured: Sequence[float]
    given_up: Sequence[float]
    evict: tuple[str, ...]


class Choice:
    """What could run now. `waiting` are the frames that could be in time, oldest first (captured_at)."""

    def __init__(
        self, state: SchedulerState, waiting: Mapping[str, Sequence[float]], costs: Costs, plan: Plan, book: Book
    ) -> None:
        self._state, self._waiting, self._costs, self._plan = state, waiting, costs, plan
        self._book = book
        self._demands: Mapping[str, QuerySpec] = plan.detail.demands
        self._absent = {query: self._look_up(query) for query in waiting}
        self._ready: set[str] = set()

    def jobs(self) -> list[Job]:
        """A job for every query of which some frame can be in time, and whose load is worth it."""
        found = []
        rates: list[tuple[str, float, float]] | None = None
        for query in self._waiting:
            job = self._job(query)
            if job is None:
                continue
            if job.missing:
                rates = self._resident_rates() if rates is None else rates
                if job.count * job.per_frame <= frames_lost(job.seconds, rates, query):
                    continue
            self._ready.add(query)
            found.append(job)
        return found

    def load_ahead(self, kept: Sequence[Job]) -> Ahead | None:
        """The query to load though none of its waiting frames would be in time, if that beats all of `kept`.

        One that is owed frames, or any for which nothing must go while nothing else could be done.
        """
        best: tuple[float, str] | None = None
        for query, absent in self._absent.items():
            if not absent.names or query in self._ready:
                continue
            cost, owed, load_s = self._costs.queries[query], self._book.owed(query), absent.load_s
            if cost.run_s > cost.sla_s:
                continue
            reload_s = self._reload_s(query)
            if owed < LOAD_AHEAD_FROM and (kept or reload_s):
                continue
            if too_late(self._waiting[query], self._state.now + load_s, cost, 1) < len(self._waiting[query]):
                continue
            frames = max(1.0, owed)
            worth = frames * self._book.claim(query)
            density = worth / (load_s + frames * cost.run_s + reload_s)
            best = max(best, (density, query)) if best else (density, query)
        if best is None or any(job.density > best[0] for job in kept):
            return None
        missing = self._absent[best[1]].names
        evict = self._room(best[1], missing, 1)
        return None if evict is None else Ahead(best[1], missing, evict)

    def barred_until(self, job: Job) -> float | None:
        """When a frame is to come that brings more for its time and could not be in time after this job; None where
        there is none such.
        """
        end = self._state.now + job.seconds
        for query, newest in self._book.shadow.newest.items():
            if query in self._ready or self._book.owed(query) < WAITED_FOR_FROM:
                continue
            cost, comes = self._costs.queries[query], newest + 1 / self._demands[query].fps
            if (
                comes >= self._state.now
                and end > comes + cost.sla_s - cost.run_s
                and self._book.claim(query) > job.density * cost.run_s
                and cost.needed <= self._state.resident
            ):
                return comes
        return None

    def run(self, job: Job) -> Run | None:
        """The batch of the job that brings most for its time: what it drives out of memory, and the frames that
        resident queries lose meanwhile, counted in.

        None when there is no room for the query.
        """
        cost, captured = self._costs.queries[job.query], self._waiting[job.query]
        best, most = None, -math.inf
        rates = self._resident_rates() if job.count > 1 else []
        for_all = self._room(job.query, job.missing, job.count)
        start = self._state.now + job.load_s
        for count in range(1, job.count + 1):
            # Where the whole batch needs no room made, no smaller one does.
            known = count == job.count or for_all == ()
            evict = for_all if known else self._room(job.query, job.missing, count)
            late = too_late(captured, start, cost, count)
            if evict is None or len(captured) - late < count:
                break
            seconds = job.load_s + cost.run_of(count)
            brings = count * job.per_frame - frames_lost(seconds, rates, job.query)
            gain = brings / max(seconds + self._load_s(evict), MIN_S)
            if gain > most:
                most = gain
                best = Run(captured[late : late + count], captured[:late], evict)
        return best

    def _job(self, query: str) -> Job | None:
        cost, captured, absent = self._costs.queries[query], self._waiting[query], self._absent[query]
        load_s = absent.load_s
        batch = batch_in_time(captured, self._state.now + load_s, cost, self._plan.batches[query])
        if not batch.count:
            return None
        seconds = load_s + cost.run_of(batch.count)
        per_frame = self._book.claim(query) * self._urgency(query)
        density = batch.count * per_frame / max(seconds + self._reload_s(query), MIN_S)
        # Where the mailbox is full when the next frame comes, the oldest is lost before its deadline.
        full_s = captured[-1] + (DEPTH + 1 - len(captured)) / self._demands[query].fps
        deadline = min(captured[batch.late] + cost.sla_s, full_s + cost.run_of(batch.count))
        return Job(query, batch.count, absent.names, load_s, seconds, deadline, per_frame, density)

    def _urgency(self, query: str) -> float:
        """What a stale result of the query costs, the more the older its newest one is."""
        demand, now = self._demands[query], self._state.now
        periods = (now - self._book.newest(query, now)) * demand.fps
        urgency = self._state.urgency.get(query, demand.urgency)
        return urgency * (1 + STALE_SHARE * min(STALE_PERIODS, periods))

    def _look_up(self, query: str) -> Absent:
        cost, resident = self._costs.queries[query], self._state.resident
        if cost.needed <= resident:
            return NOTHING
        names = tuple(name for name in cost.tensors if name not in resident)
        return Absent(names, self._load_s(names), self._costs.resident_bytes(names))

    def _load_s(self, names: Sequence[str]) -> float:
        return self._costs.load_s(self._costs.moved_bytes(names)) if names else 0.0

    def _reload_s(self, query: str) -> float:
        """About how long it will take to bring back what must go for one frame of this query."""
        needed = self._costs.queries[query].workspace_bytes + self._absent[query].nbytes
        return max(0, self._state.resident_bytes + needed - self._plan.budget_bytes) / self._costs.copy_bytes_per_s

    def _room(self, query: str, missing: Sequence[str], count: int) -> tuple[str, ...] | None:
        return pick_evictions(self._state, self._costs, self._plan, query, missing, count)

    def _resident_rates(self) -> list[tuple[str, float, float]]:
        """Of every resident query: frames per second, and seconds that a frame of it can wait."""
        return [
            (query, demand.fps, cost.sla_s - cost.run_s)
            for query, demand in self._demands.items()
            if (cost := self._costs.queries[query]).needed <= self._state.resident
        ]
