"""Next use: which tensors are needed when in the cyclic order of turns, and so which can go first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edge_runtime.schedule.costs import Costs

REMEMBERED = 1024


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
