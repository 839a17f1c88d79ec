"""Batches: how many frames of a query can run together in time, and the sizes the paper would choose beforehand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemel.edge_runtime.scheduler.costs import BATCHES, Costs, QueryCost
from gemel.edge_runtime.scheduler.order import cycle_loads
from gemel.edge_runtime.scheduler.types import CLOCK_SLACK_S, QuerySpec


class FeasibleBatch(NamedTuple):
    """`count` frames that finish in time, after `late` older ones are given up; count 0 when none can."""

    count: int
    late: int


def batch_in_time(waiting: Sequence[float], start: float, cost: QueryCost, most: int) -> FeasibleBatch:
    """The largest batch that, begun at `start`, finishes within the SLA of every frame in it.

    Of equally many frames the oldest are taken. Frames too old for the batch that newer ones allow are given up.
    """
    # The innermost loop of a plan: `too_late` is written out.
    runs_s, sla_s, waits = cost.runs_s, cost.sla_s, len(waiting)
    late = bisect_left(waiting, start + runs_s[0] - sla_s - CLOCK_SLACK_S)
    best = 1 if late < waits else 0
    for count in range(2, min(most, waits - late) + 1):
        then_late = bisect_left(waiting, start + runs_s[count - 1] - sla_s - CLOCK_SLACK_S)
        if waits - then_late < count:
            break
        best, late = count, then_late
    return FeasibleBatch(best, late)


def too_late(waiting: Sequence[float], start: float, cost: QueryCost, count: int) -> int:
    """How many of the oldest frames would be late in a batch of `count` begun at `start`."""
    return bisect_left(waiting, start + cost.run_of(count) - cost.sla_s - CLOCK_SLACK_S)


def largest_batches(costs: Costs, budget_bytes: int, most: int = BATCHES[-1]) -> dict[str, int]:
    """The largest batch of each query that the budget allows beside its own weights, 1 at least."""
    found = {}
    for query, cost in costs.queries.items():
        room = budget_bytes - costs.weights_bytes(query)
        fitting = [count for count in BATCHES if count <= min(cost.largest, most) and cost.workspace_of(count) <= room]
        found[query] = max(fitting, default=1)
    return found


@dataclass(frozen=True, slots=True)
class ExpectedRound:
    """What one round of the cycle is expected to give: its length, and the frames in time of each query in it."""

    seconds: float
    frames: Mapping[str, float]

    def per_second(self, query: str) -> float:
        return self.frames[query] / self.seconds if self.seconds else 0.0


def expected_round(
    costs: Costs, specs: Mapping[str, QuerySpec], loads: Mapping[str, int], batches: Mapping[str, int]
) -> ExpectedRound:
    """A settled round in which every query loads what is missing and then runs one batch at most.

    A query finds the frames that arrived since its last turn and can still be in time; with fewer than the batch
    takes, it runs those. The round is as long as its loads and runs, or idle for lack of frames.
    """
    load_s = sum(costs.load_s(loads[query]) for query in batches)
    most = {query: _in_time_at_once(costs.queries[query], specs[query].fps, size) for query, size in batches.items()}
    longest = load_s + sum(_run_s(costs.queries[query], count) for query, count in most.items())
    low, high = 0.0, longest
    for _ in range(40):
        seconds = (low + high) / 2
        frames = {query: min(count, specs[query].fps * seconds) for query, count in most.items()}
        needed = load_s + sum(_run_s(costs.queries[query], count) for query, count in frames.items())
        low, high = (seconds, high) if needed > seconds else (low, seconds)
    return ExpectedRound(high, {query: min(count, specs[query].fps * high) for query, count in most.items()})


def _in_time_at_once(cost: QueryCost, fps: float, batch: int) -> float:
    """Frames that one batch can finish in time: no older ones wait than the SLA less the run allows."""
    best = 0.0
    for count in range(1, min(batch, cost.largest) + 1):
        waiting = 1 + fps * (cost.sla_s - cost.run_of(count))
        best = max(best, min(float(count), waiting) if waiting >= 1 else 0.0)
    return best


def _run_s(cost: QueryCost, frames: float) -> float:
    """Seconds for a number of frames that is an average over rounds."""
    if frames <= 1:
        return frames * cost.run_s
    low = min(int(frames), cost.largest)
    high = min(low + 1, cost.largest)
    return cost.run_of(low) + (frames - low) * (cost.run_of(high) - cost.run_of(low))


def worst_first_batches(
    costs: Costs, specs: Mapping[str, QuerySpec], order: Sequence[str], budget_bytes: int
) -> dict[str, int]:
    """Batch sizes of 1, 2, 4 or 8 with which the worst query gets the largest share of its frames in time.

    The paper tries all combinations. The same optimum is reached by starting from all ones and enlarging the batches
    of the worst queries (all that are equally badly off) for as long as each of them can be: a larger batch of any
    other query only makes the round longer, so every better choice enlarges those of the worst too.
    """
    largest = largest_batches(costs, budget_bytes)
    batches = dict.fromkeys(order, 1)
    best, best_share = dict(batches), -1.0
    while True:
        expected = expected_round(costs, specs, cycle_loads(costs, order, budget_bytes, batches), batches)
        shares = {query: expected.per_second(query) / specs[query].fps for query in order}
        least = min(shares.values())
        if least > best_share + CLOCK_SLACK_S:
            best, best_share = dict(batches), least
        for query in (query for query, share in shares.items() if share <= least + CLOCK_SLACK_S):
            larger = [count for count in BATCHES if batches[query] < count <= largest[query]]
            if not larger:
                return best
            batches[query] = larger[0]
