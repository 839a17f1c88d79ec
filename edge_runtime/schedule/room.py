"""Room: what to evict so that a query fits, what is needed last going first and no more than must go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.values import Plan, Situation


def room_for(
    situation: Situation, costs: Costs, plan: Plan, query: str, missing: Sequence[str], count: int
) -> tuple[str, ...] | None:
    """The tensors to evict so that `query` can run `count` frames once `missing` is loaded; None if it never fits.

    In the plan's cyclic order, what the queries just before this one need is needed last. Among tensors that are
    needed at the same time the smallest that suffices goes; what then proves not to be in the way stays.
    """
    cost = costs.queries[query]
    excess = (situation.resident_bytes + costs.resident_bytes(missing) + cost.workspace_of(count)) - plan.budget_bytes
    if excess <= 0:
        return ()
    sizes, resident = costs.footprints, situation.resident
    evict: list[str] = []
    order, here = plan.order, plan.order.index(query)
    for later in plan.next_use.of(costs, (*order[here + 1 :], *order[:here]), query):
        names = [name for name in later if name in resident]
        freed = costs.resident_bytes(names)
        if freed > excess:
            names = _just_enough(names, sizes, excess)
            freed = costs.resident_bytes(names)
        evict += names
        excess -= freed
        if excess <= 0:
            return _spared(evict, sizes, -excess)
    return None


def _just_enough(names: Sequence[str], sizes: Mapping[str, int], excess: int) -> list[str]:
    """Tensors that free so many bytes: the smallest that suffices, or the largest and what else it then takes."""
    ascending = sorted((sizes[name], name) for name in names)
    chosen = []
    while excess > 0:
        enough = min(bisect_left(ascending, (excess, "")), len(ascending) - 1)
        size, name = ascending.pop(enough)
        chosen.append(name)
        excess -= size
    return chosen


def _spared(evict: list[str], sizes: Mapping[str, int], surplus: int) -> tuple[str, ...]:
    """What need not go after all stays, the largest first: `surplus` bytes are freed beyond what is needed."""
    if surplus >= min(map(sizes.__getitem__, evict)):
        for name in sorted(evict, key=lambda name: (-sizes[name], name)):
            if sizes[name] <= surplus:
                evict.remove(name)
                surplus -= sizes[name]
    return tuple(evict)
