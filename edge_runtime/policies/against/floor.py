"""The floor: what each query's original would have under time-sharing in the same memory, nothing shared."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.policies.against.originals import TIME_SHARING, AsOriginals
from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.paper import Paper
from edge_runtime.policies.worth import in_sum
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Decision, Demand, Plan, Policy, Situation

PAPER, AS_ORIGINALS = Paper(), AsOriginals()
# The first of these is for the box to settle, the second is counted.
SETTLED_S, COUNTED_S = 10.0, 20.0
# More frames than these are not played: planning is not to take seconds.
MOST_FRAMES = 20_000
# Phases of the queries' frames, which are not known yet: multiples of this never come close to each other.
GOLDEN = 0.618
# So much of the floor is as good as all of it: phases are others than here.
SLACK = 0.99


def floor_of(costs: Costs, demands: Mapping[str, Demand], budget_bytes: int) -> dict[str, float]:
    """What each query would have brought a second, on a virtual clock; nothing where frames in time are aimed at."""
    if not any(demand.staleness for demand in demands.values()):
        return {}
    if (SETTLED_S + COUNTED_S) * sum(demand.fps for demand in demands.values()) > MOST_FRAMES:
        return {}
    apart = TIME_SHARING.view(costs)
    return rehearsed(TIME_SHARING, apart, TIME_SHARING.plan(apart, demands, budget_bytes), demands)


def reference_above(
    floor: Mapping[str, float], costs: Costs, demands: Mapping[str, Demand], budget_bytes: int
) -> Reference:
    """The paper's turns in the order of sharing or, where that leaves more queries below the floor, as listed; the
    originals' pace, which leaves none, where both leave some.
    """
    in_order = Reference(PAPER, PAPER.plan(costs, demands, budget_bytes))
    if not floor:
        return in_order
    as_listed = Reference(PAPER, TIME_SHARING.plan(TIME_SHARING.view(costs), demands, budget_bytes))

    def kept(reference: Reference) -> tuple[int, float]:
        brought = rehearsed(reference.policy, costs, reference.plan, demands)
        return -sum(brought[query] < SLACK * least for query, least in floor.items()), in_sum(brought, demands)

    (below, _), best = max(((kept(one), one) for one in (in_order, as_listed)), key=lambda pair: pair[0])
    return best if not below else Reference(AS_ORIGINALS, AS_ORIGINALS.plan(costs, demands, budget_bytes))


def rehearsed(policy: Policy, costs: Costs, plan: Plan, demands: Mapping[str, Demand]) -> dict[str, float]:
    """What each query brings a second under a policy that has settled, on a virtual clock."""
    box, until_s = VirtualBox(0.0, demands=demands), SETTLED_S + COUNTED_S
    box.expect(
        ((place * GOLDEN % 1 + index) / demand.fps, query)
        for place, (query, demand) in enumerate(demands.items())
        for index in range(int(until_s * demand.fps))
    )

    def decide(situation: Situation) -> Decision:
        return policy.decide(situation, costs, plan)

    while box.now < SETTLED_S:
        box.step(SETTLED_S, costs, decide)
    box = box.recounted()
    began = box.now
    while box.now < until_s:
        box.step(until_s, costs, decide)
    return {query: box.brought(query) / (box.now - began) for query in demands}
