"""Room: what to evict so that a query fits, what is needed last going first and no more than must go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from edge_runtime.costs import Costs
from edge_runtime.schedule.values import Situation


def room_for(situation: Situation, costs: Costs, order: Sequence[str], budget_bytes: int, query: str,
             missing: Sequence[str], count: int) -> tuple[str, ...] | None:
    """The tensors to evict so that `query` can run `count` frames once `missing` is loaded; None if it never fits.

    In the cyclic `order`, what the queries just before this one need is needed last. Among tensors that are needed
    at the same time the smallest that suffices goes; what then proves not to be in the way stays.
    """
    cost = costs.queries[query]
    excess = (situation.resident_bytes + costs.resident_bytes(missing) + cost.workspace_of(count)) - budget_bytes
    if excess <= 0:
        return ()
    sizes = costs.footprints
    evict: list[str] = []
    for names in _by_next_use(situation, costs, order, query):
        ascending = sorted((sizes[name], name) for name in names)
        while ascending and excess > 0:
            enough = min(bisect_left(ascending, (excess, "")), len(ascending) - 1)
            size, name = ascending.pop(enough)
            evict.append(name)
            excess -= size
        if excess <= 0:
            break
    if excess > 0:
        return None
    for name in sorted(evict, key=lambda name: (-sizes[name], name)):
        if sizes[name] <= -excess:
            evict.remove(name)
            excess += sizes[name]
    return tuple(evict)


def _by_next_use(situation: Situation, costs: Costs, order: Sequence[str], query: str) -> list[list[str]]:
    """Resident tensors that `query` does not need, those needed at the same time together, the last needed first."""
    here = order.index(query)
    coming = [*order[here + 1:], *order[:here]]
    seen = set(costs.queries[query].needed)
    found = []
    for other in coming:
        names = [name for name in costs.queries[other].tensors if name in situation.resident and name not in seen]
        seen.update(names)
        if names:
            found.append(list(dict.fromkeys(names)))
    unused = [name for name in situation.resident if name not in seen]
    return [unused, *reversed(found)] if unused else found[::-1]
