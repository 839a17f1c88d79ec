"""Room: what to evict so that a query fits, what is needed last going first and no more than must go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_runtime.schedule.costs import Costs

if TYPE_CHECKING:
    from edge_runtime.schedule.values import Situation

REMEMBERED = 1024


def room_for(
    situation: Situation,
    costs: Costs,
    order: Sequence[str],
    budget_bytes: int,
    query: str,
    missing: Sequence[str],
    count: int,
    known: NextUse | None = None,
) -> tuple[str, ...] | None:
    """The tensors to evict so that `query` can run `count` frames once `missing` is loaded; None if it never fits.

    In the cyclic `order`, what the queries just before this one need is needed last. Among tensors that are needed
    at the same time the smallest that suffices goes; what then proves not to be in the way stays. `known` saves
    working out again what is needed when.
    """
    cost = costs.queries[query]
    excess = (situation.resident_bytes + costs.resident_bytes(missing) + cost.workspace_of(count)) - budget_bytes
    if excess <= 0:
        return ()
    sizes, resident = costs.footprints, situation.resident
    evict: list[str] = []
    here = order.index(query)
    for later in (known or NextUse()).of(costs, (*order[here + 1 :], *order[:here]), query):
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


class NextUse:
    """Which tensors are needed when, looked up in every decision: a few orders of turns come again and again."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], str], tuple[tuple[str, ...], ...]] = {}

    def of(self, costs: Costs, coming: tuple[str, ...], query: str) -> tuple[tuple[str, ...], ...]:
        """`by_next_use` of all tensors; `costs` may differ between calls in times, not in tensors."""
        found = self._known.get((coming, query))
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[coming, query] = tuple(by_next_use(costs, coming, costs.queries[query].needed))
        return found


def by_next_use(costs: Costs, coming: Sequence[str], kept: frozenset[str]) -> Iterator[tuple[str, ...]]:
    """Tensors that are not `kept`, those needed at the same time together, the last needed first.

    `coming` are the queries in the order of their next turns; a tensor that several need counts as needed when the
    first of them has its turn. Tensors that none of them needs come before all others. Each group is in load order.
    """
    free = frozenset(costs.tensor_bytes) - kept
    unused = _less(free, (costs.queries[query].needed for query in coming))
    if unused:
        yield tuple(sorted(unused))
    for place in range(len(coming) - 1, -1, -1):
        cost = costs.queries[coming[place]]
        last = _less(free & cost.needed, (costs.queries[sooner].needed for sooner in coming[:place]))
        if last:
            yield tuple(name for name in cost.tensors if name in last)


def _less(names: frozenset[str], others: Iterable[frozenset[str]]) -> frozenset[str]:
    """Names that none of the others holds; one after the other, since that is over as soon as none is left."""
    for other in others:
        if not names:
            break
        names -= other
    return names
