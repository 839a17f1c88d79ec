"""The health of queries before and after an update, and a test whether one has got worse.

At most one good update in a hundred is taken back (`ERROR`), however often one looks. Before the update each `TICK_S`
gives a share of frames in time and one of frames that did not fail. Their lower ends, less a tolerance, are limits;
after it a detector of each query and limit bets that its mean is below. Simulated (benchmarks/serving/watching.py):
4 queries, 5 fps, ten minutes, 80 to 99 % in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from gemel.edge_runtime.life.load_monitor import OVERLOAD_REASONS, LoadLimits
from gemel.models.files.io import Exact, Name
from gemel.models.measures.bounds import upper_ends
from gemel.models.measures.sequential import FallDetector, start_test

ERROR = 0.01
"""Likelihood that an update which changes nothing is taken back; half of it is spent on the time before."""
MAX_WORSE = 0.05
"""Share of a query's frames by which it may get worse."""
MIN_TICKS, MIN_FRAMES = 60, 20
"""A time before with fewer ticks says nothing, nor does a query with fewer frames."""
MAX_MORE_ASKED = 1.1
"""Times the most frames of a tick before: with more, lateness is not the update's."""


@dataclass(frozen=True, slots=True)
class QueryHealth:
    """Frames of a query over some time: all, those answered in time, those failed, those lost to overload."""

    received: int = 0
    in_time: int = 0
    failed: int = 0
    lost: int = 0


Healths = Mapping[str, QueryHealth]


class QueryLimits(Exact):
    """Shares of a query's frames in time, and of those that do not fail, below which it is worse; None: not judged."""

    in_time: float | None = None
    sound: float | None = None


class HealthLimits(Exact):
    """What the time before an update says: limits of each query, and the most frames that a tick asked of the box."""

    queries: dict[Name, QueryLimits] = Field(default_factory=dict)
    most_asked: int = 0


@dataclass(frozen=True)
class Lapse:
    """A query that got worse, why, and whether it is merely late."""

    query: str
    reason: str
    is_late: bool


def count_health(ledger: Iterable[Mapping[str, Any]]) -> dict[str, QueryHealth]:
    """The counts of all queries so far, out of the rows of a ledger (`Ledger.to_json`)."""
    counts = {}
    for row in ledger:
        lost = sum(row["dropped"].get(reason, 0) for reason in OVERLOAD_REASONS)
        received = row["processed"] + row["failed"] + lost
        counts[row["query"]] = QueryHealth(received, row["processed"] - row["late"], row["failed"], lost)
    return counts


def health_between(first: Healths, last: Healths) -> dict[str, QueryHealth]:
    """What came to the counts between two moments."""
    zero, between = QueryHealth(), {}
    for query, now in last.items():
        then = first.get(query, zero)
        between[query] = QueryHealth(
            max(0, now.received - then.received), max(0, now.in_time - then.in_time),
            max(0, now.failed - then.failed), max(0, now.lost - then.lost),
        )  # fmt: skip
    return between


def measure_limits(ticks: Sequence[Healths]) -> HealthLimits:
    """The limits after these ticks; lateness is not judged where the box was overloaded in them."""
    names = {query for tick in ticks for query in tick}
    parts = [part for tick in ticks for part in tick.values()]
    received, lost = sum(part.received for part in parts), sum(part.lost for part in parts)
    is_overloaded = lost > LoadLimits().begins * received
    limits = {}
    for query in names:
        known = [tick[query] for tick in ticks if query in tick and tick[query].received]
        in_time = [part.in_time / part.received for part in known]
        sound = [1 - part.failed / part.received for part in known]
        limits[query] = QueryLimits(
            in_time=None if is_overloaded else _find_limit(in_time, len(names)), sound=_find_limit(sound, len(names))
        )
    return HealthLimits(queries=limits, most_asked=max(map(_count_asked, ticks), default=0))


def _find_limit(shares: Sequence[float], queries: int) -> float | None:
    """The lower end of the mean of shares, less the tolerance; None where there are too few."""
    if len(shares) < MIN_TICKS:
        return None
    lost = 1 - np.asarray(shares)
    limit = 1 - float(upper_ends(lost, np.ones_like(lost), np.asarray(1.0), _error_of_test(queries))) - MAX_WORSE
    return limit if limit > 0 else None


def _error_of_test(queries: int) -> float:
    """Shared among queries, their two limits, and the time before and after."""
    return ERROR / (4 * max(1, queries))


def _count_asked(tick: Healths) -> int:
    return sum(part.received for part in tick.values())


class HealthWatch:
    """Follows the queries after an update, tick by tick."""

    def __init__(self, limits: HealthLimits) -> None:
        self.limits = limits
        self._total: dict[str, QueryHealth] = {}
        self._detectors: dict[tuple[str, bool], FallDetector] = {}

    def add(self, tick: Healths) -> Lapse | None:
        """Take what the last tick brought; a query that is worse than before, if there is one."""
        is_comparable = _count_asked(tick) <= MAX_MORE_ASKED * self.limits.most_asked
        for query, part in tick.items():
            limits = self.limits.queries.get(query, QueryLimits())
            if limits.sound is None:
                reason = self._find_failing(query, part)
            else:
                reason = self._find_fall(query, False, limits.sound, part.received - part.failed, part.received)
            if reason is not None:
                return Lapse(query, reason, is_late=False)
            if is_comparable and limits.in_time is not None:
                reason = self._find_fall(query, True, limits.in_time, part.in_time, part.received)
                if reason is not None:
                    return Lapse(query, reason, is_late=True)
        return None

    def _find_fall(self, query: str, is_late: bool, limit: float, good: int, received: int) -> str | None:
        if not received:
            return None
        detector = self._detectors.get((query, is_late))
        if detector is None:
            detector = start_test(limit, _error_of_test(len(self.limits.queries)))
            self._detectors[query, is_late] = detector
        if not detector.add(good / received, frames=0):
            return None
        what = "in time" if is_late else "without failure"
        return f"fewer of its frames are {what} than before, surely less than {limit:.0%}"

    def _find_failing(self, query: str, part: QueryHealth) -> str | None:
        """Whether most frames of a query fail of which nothing is known before."""
        earlier = self._total.get(query, QueryHealth())
        total = QueryHealth(earlier.received + part.received, 0, earlier.failed + part.failed)
        self._total[query] = total
        is_failing = total.received >= MIN_FRAMES and total.failed > total.received / 2
        return f"{total.failed} of {total.received} frames failed" if is_failing else None
