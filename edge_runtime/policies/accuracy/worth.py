"""Worth: how much an answer is wanted where accuracy over time is the objective."""

from __future__ import annotations

from edge_runtime.scheduler.types import QuerySpec, staleness_gain

# An answer that is as good as the one before is still worth this much: where nothing else is to be done, it is given.
MIN_GAIN = 1e-3


def wanted(demand: QuerySpec, known: float | None, captured_at: float) -> float:
    """How much an answer to a frame is wanted where the newest is of a frame captured at `known`, None where there is
    none yet; per second, so that queries count alike however many frames they ask for.
    """
    frames = float(len(demand.staleness))
    if known is not None:
        frames = max(0.0, (captured_at - known) * demand.fps)
    return max(MIN_GAIN, staleness_gain(demand.staleness, frames)) / demand.fps
