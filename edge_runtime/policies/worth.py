"""Worth: what frames bring by the objective, so that policies count either alike.

Where the objective is frames in time, each is worth 1. Where it is accuracy over time, what frames bring depends on how
long their answers stand; queries then count alike, however many frames they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.schedule.staleness import gain, stood_for
from edge_runtime.schedule.values import Demand

# An answer that is as good as the one before is still worth this much: where nothing else is to be done, it is given.
LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest answer of a query: when its frame was captured, and until when its worth has been counted."""

    captured: float
    counted: float


def brought(demand: Demand | None, captured: Sequence[float], stands: Standing | None, until: float) -> float:
    """What frames that are run bring (captured_at): their number, or how long and how well the answer before them
    stood; the last one's worth shows when the next one ends it, at `until`.
    """
    return stood(demand, stands, until) if demand is not None and demand.staleness else len(captured)


def stood(demand: Demand | None, stands: Standing | None, until: float) -> float:
    """What an answer has brought since it was counted last; nothing where frames in time are counted."""
    if demand is None or not demand.staleness or stands is None or until <= stands.counted:
        return 0.0
    ages = [(at - stands.captured) * demand.fps for at in (stands.counted, until)]
    return stood_for(demand.staleness, ages[1]) - stood_for(demand.staleness, ages[0])


def wanted(demand: Demand, stands: Standing | None, captured_at: float) -> float:
    """How much a frame is wanted that would be the newest; 1 where the objective is frames in time."""
    if not demand.staleness:
        return 1.0
    frames = float(len(demand.staleness))
    if stands is not None:
        frames = max(0.0, (captured_at - stands.captured) * demand.fps)
    return max(LEAST_GAIN, gain(demand.staleness, frames))


def in_sum(counts: Mapping[str, float], demands: Mapping[str, Demand]) -> float:
    """What was brought in all, each query's by its priority."""
    shares = query_shares(demands)
    return sum(count * demands[query].urgency * shares[query] for query, count in counts.items())


def query_shares(demands: Mapping[str, Demand]) -> Mapping[str, float]:
    """How much a frame of each query counts: all alike, or by how few there are where accuracy is the objective."""
    mean_fps = sum(demand.fps for demand in demands.values()) / len(demands)
    return {query: mean_fps / demand.fps if demand.staleness else 1.0 for query, demand in demands.items()}
