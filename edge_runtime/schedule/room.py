"""Room: what to evict so that a query fits, what is needed last going first and no more than must go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence, Set

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
    here = order.index(query)
    coming = [*order[here + 1:], *order[:here]]
    for names in by_next_use(situation.resident, costs, coming, cost.needed):
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


def by_next_use(resident: Set[str], costs: Costs, coming: Sequence[str], kept: Set[str]) -> Iterator[list[str]]:
    """Resident tensors that are not `kept`, those needed at the same time together, the last needed first.

    `coming` are the queries in the order of their next turns; a tensor that several need counts as needed when the
    first of them has its turn. Tensors that none of them needs come before all others. Each list is in load order.
    """
    unused = frozenset(resident).difference(kept, *(costs.queries[query].needed for query in coming))
    if unused:
        yield sorted(unused)
    for place in range(len(coming) - 1, -1, -1):
        cost = costs.queries[coming[place]]
        last = cost.needed.intersection(resident).difference(
            kept, *(costs.queries[sooner].needed for sooner in coming[:place]))
        if last:
            yield [name for name in dict.fromkeys(cost.tensors) if name in last]
