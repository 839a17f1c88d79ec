"""The load of a box over the last minute: frames asked for, answered and dropped, and whether it is overloaded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemel.edge_runtime.frames.queues import DEADLINE, MEMORY, OVERLOAD, REPLACED

OVERLOAD_REASONS = (DEADLINE, REPLACED, MEMORY, OVERLOAD)
"""Reasons of drops that more time or memory would prevent."""

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a box counts as overloaded: `begins` and `ends` are shares of the frames of the last `window_s`."""

    window_s: float = 60.0
    interval_s: float = 2.0
    """Between two samples."""
    begins: float = 0.1
    ends: float = 0.05
    """Lower, so that a box at the limit does not change its state with every sample."""
    min_frames: int = 20
    min_s: float = 10.0
    """A shorter record says nothing."""


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Frames received and dropped for lack of time or memory in the last minute."""

    received: int = 0
    dropped: int = 0
    seconds: float = 0.0

    @property
    def received_fps(self) -> float:
        """Frames received a second."""
        return self.received / self.seconds if self.seconds else 0.0

    @property
    def answered_fps(self) -> float:
        """Frames a second that were not dropped."""
        return (self.received - self.dropped) / self.seconds if self.seconds else 0.0

    @property
    def dropped_share(self) -> float:
        """Of the frames received."""
        return min(1.0, self.dropped / self.received) if self.received else 0.0


class LoadMonitor:
    """Follows the ledger; `add` from one thread, everything else from any."""

    def __init__(self, limits: LoadLimits | None = None) -> None:
        self.limits = limits or LoadLimits()
        self.is_overloaded = False
        self.queries: Mapping[str, LoadShare] = {}
        self.box = LoadShare()
        self._samples: deque[tuple[float, dict[str, tuple[int, int]]]] = deque()

    def add(self, now: float, ledger: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Take a sample of `ledger` (`Ledger.to_json`) where one is due; a change of the state is logged once."""
        limits = self.limits
        if self._samples and now < self._samples[-1][0] + limits.interval_s:
            return
        self._samples.append((now, {row["query"]: _counts(row) for row in ledger()}))
        while len(self._samples) > 2 and self._samples[1][0] <= now - limits.window_s:
            self._samples.popleft()
        began, first = self._samples[0]
        last = self._samples[-1][1]
        self.queries = {
            query: _difference(first.get(query, (0, 0)), counts, now - began) for query, counts in last.items()
        }
        self.box = LoadShare(
            sum(one.received for one in self.queries.values()),
            sum(one.dropped for one in self.queries.values()),
            now - began,
        )
        if now - began < limits.min_s or self.box.received < limits.min_frames:
            return
        bound = limits.ends if self.is_overloaded else limits.begins
        is_overloaded = self.box.dropped_share >= bound
        if is_overloaded is not self.is_overloaded:
            self.is_overloaded = is_overloaded
            self._log_change()

    def _log_change(self) -> None:
        share = f"{self.box.dropped_share:.0%} of the frames of the last minute were dropped"
        if not self.is_overloaded:
            log.info("no longer overloaded: %s", share)
            return
        worst = max(self.queries, key=lambda query: self.queries[query].dropped_share)
        log.warning(
            "overloaded: %s; %.1f frames a second are asked for, %.1f answered; most are lost of query %s (%.0f %%): "
            "lower its fps, or see `gemel plan`",
            share, self.box.received_fps, self.box.answered_fps, worst, 100 * self.queries[worst].dropped_share,
        )  # fmt: skip


def _counts(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["received"], sum(row["dropped"].get(reason, 0) for reason in OVERLOAD_REASONS)


def _difference(first: tuple[int, int], last: tuple[int, int], seconds: float) -> LoadShare:
    return LoadShare(last[0] - first[0], last[1] - first[1], seconds)
