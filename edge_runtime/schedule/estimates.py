"""Estimates: the costs as a box knows them, corrected with every load and run."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.schedule.costs import Costs

# Share of the newest measurement in a running average of costs.
NEWEST_SHARE = 0.2
# How much a run time is lowered for each frame that it cost.
DOUBT_SHARE = 0.05
# Loads smaller than this say more about the latency than about the rate of copying.
RATE_FROM_BYTES = 2**20


class Estimates:
    """Running averages of what runs and copies take: a box that throttles is followed, a single stall is not.

    `costs` is the present belief. A run of any batch corrects the query's times of all batches in proportion.
    """

    def __init__(self, costs: Costs, best_s: Mapping[str, float] | None = None) -> None:
        self.costs = costs
        self.best_s = dict(best_s or {})

    def warmed(self, run_s: Mapping[str, float], copy_bytes_per_s: float) -> None:
        """Take over what the warm-up measured: seconds of a run of one frame, and the rate of copying."""
        for query, seconds in run_s.items():
            self.best_s[query] = seconds
            self.costs = self.costs.with_measured(query, seconds, copy_bytes_per_s)

    def loaded(self, query: str, moved_bytes: int, seconds: float) -> None:
        """A load for `query` moved so many bytes in so long."""
        if moved_bytes >= RATE_FROM_BYTES and seconds > 0:
            rate = _average(self.costs.copy_bytes_per_s, moved_bytes / seconds)
            self.costs = self.costs.with_measured(query, self.costs.queries[query].run_s, rate)

    def ran(self, query: str, count: int, seconds: float) -> None:
        """A run of `count` frames took so long."""
        cost = self.costs.queries[query]
        expected = cost.run_of(count)
        single = cost.run_s * seconds / expected if expected > 0 else seconds / count
        self.best_s[query] = min(self.best_s.get(query, single), single)
        run_s = _average(cost.run_s, single)
        self.costs = self.costs.with_measured(query, run_s, self.costs.copy_bytes_per_s)

    def doubt(self, query: str) -> None:
        """Lower a run time that cost a frame a little: to the best one seen, or into the SLA if even that is above.

        A query believed too slow is not run, and what is not run is not measured: a stall, during the warm-up too,
        must not be for ever. A query that is too slow indeed is tried again from time to time, and publishes late.
        """
        cost = self.costs.queries[query]
        best = self.best_s.get(query, cost.run_s)
        target = min(cost.run_s, best if best <= cost.sla_s else cost.sla_s / 2)
        lower = _average(cost.run_s, target, DOUBT_SHARE)
        self.costs = self.costs.with_measured(query, lower, self.costs.copy_bytes_per_s)


def _average(known: float, measured: float, share: float = NEWEST_SHARE) -> float:
    return known + share * (measured - known)
