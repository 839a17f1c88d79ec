"""Worth: how much an answer is wanted where accuracy over time is the objective."""

from __future__ import annotations

from edge_runtime.schedule.staleness import gain
from edge_runtime.schedule.values import Demand

# An answer that is as good as the one before is still worth this much: where nothing else is to be done, it is given.
MIN_GAIN = 1e-3


def wanted(demand: Demand, known: float | None, captured_at: float) -> float:
    """How much an answer to a frame is wanted where the newest is of a frame captured at `known`, None where there is
    none yet; per second, so that queries count alike however many frames they ask for.
    """
    frames = float(len(demand.staleness))
    if known is not None:
        frames = max(0.0, (captured_at - known) * demand.fps)
    return max(MIN_GAIN, gain(demand.staleness, frames)) / demand.fps
