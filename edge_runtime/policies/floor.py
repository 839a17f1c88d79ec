"""The floor: what each query's original would have under time-sharing in the same memory, nothing shared."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.policies.time_sharing import TimeSharing
from edge_runtime.policies.virtual import VirtualBox
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Demand, Situation

# The first of these is for the box to settle, the second is counted.
SETTLED_S, COUNTED_S = 10.0, 20.0
# More frames than these are not played: planning is not to take seconds.
MOST_FRAMES = 20_000
# Phases of the queries' frames, which are not known yet: multiples of this never come close to each other.
GOLDEN = 0.618


def floor_of(costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> dict[str, float]:
    """What each query would have brought a second, on a virtual clock; nothing where frames in time are aimed at."""
    until_s = SETTLED_S + COUNTED_S
    if not any(demand.staleness for demand in demands.values()):
        return {}
    if until_s * sum(demand.fps for demand in demands.values()) > MOST_FRAMES:
        return {}
    policy = TimeSharing()
    seen = policy.view(costs)
    plan = policy.plan(seen, demands, budget_bytes)
    box = VirtualBox(0.0, demands=demands)
    box.expect(
        ((place * GOLDEN % 1 + index) / demand.fps, query)
        for place, (query, demand) in enumerate(demands.items())
        for index in range(int(until_s * demand.fps))
    )

    def decide(situation: Situation) -> Decision:
        return policy.decide(situation, seen, plan)

    while box.now < SETTLED_S:
        box.step(SETTLED_S, seen, decide)
    box = box.recounted()
    began = box.now
    while box.now < until_s:
        box.step(until_s, seen, decide)
    return {query: box.brought(query) / (box.now - began) for query in demands}
