"""Which process has which queries: about the same FLOPs each, and few bytes of weights that several must agree on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

SLACK = 0.05
"""How much more than the most even placement's largest load a process may have, so that fewer bytes cross."""

ROUNDS = 10
"""How often all are asked whether they would sit better elsewhere."""

Shares = Sequence[tuple[Collection[str], int]]
"""Sets of queries that share something, and its bytes."""


def placed(flops: Mapping[str, float], shares: Shares, processes: int) -> list[list[str]]:
    """The queries of each process, of which `flops` tells what a frame takes.

    The heaviest first, each goes to where it makes fewest bytes cross, of those processes on which it makes no load
    larger than the most even placement's (and a little more); then queries move and change places while that makes
    fewer. Queries stay in their order, and processes are numbered by their first.
    """
    table = _Table(flops, shares, processes)
    for query in sorted(flops, key=lambda query: -flops[query]):
        fits = [rank for rank in range(processes) if table.loads[rank] + flops[query] <= table.most]
        costs = {rank: (table.added(query, rank), table.loads[rank]) for rank in fits}
        table.put(query, min(costs, key=lambda rank: costs[rank]) if costs else table.loads.index(min(table.loads)))
    table.most = max(table.most, *table.loads)
    for _ in range(ROUNDS):
        if not sum(table.improve(query) for query in flops):
            break
    order = list(flops)
    parts = [[query for query in order if table.where[query] == rank] for rank in range(processes)]
    return sorted(parts, key=lambda part: order.index(part[0]) if part else len(order))


def crossing(parts: Sequence[Collection[str]], shares: Shares) -> int:
    """Bytes that cross: of everything shared, once for each process beyond the first that has some of its queries."""
    users = ((sum(not set(part).isdisjoint(queries) for part in parts), nbytes) for queries, nbytes in shares)
    return sum((count - 1) * nbytes for count, nbytes in users if count > 1)


class _Table:
    """Who sits where, and for every set how many of its queries each process has."""

    def __init__(self, flops: Mapping[str, float], shares: Shares, processes: int) -> None:
        self.where: dict[str, int] = {}
        self.loads = [0.0] * processes
        self.most = (1 + SLACK) * max(map(sum, _even(flops, processes)))
        self._flops = flops
        self._counts = [Counter[int]() for _ in shares]
        self._own: dict[str, list[tuple[int, int]]] = {query: [] for query in flops}
        for index, (queries, nbytes) in enumerate(shares):
            for query in set(queries) & flops.keys():
                self._own[query].append((index, nbytes))

    def added(self, query: str, rank: int) -> int:
        """The bytes that cross more with this query there."""
        mine = ((self._counts[index], nbytes) for index, nbytes in self._own[query])
        return sum(nbytes for count, nbytes in mine if count and not count[rank])

    def put(self, query: str, rank: int) -> None:
        """This query sits there now."""
        self.where[query] = rank
        self.loads[rank] += self._flops[query]
        for index, _ in self._own[query]:
            self._counts[index][rank] += 1

    def improve(self, query: str) -> bool:
        """Move a query, or let it change places with another, if fewer bytes cross then and no load is too large."""
        for rank in range(len(self.loads)):
            for partner in (None, *(other for other in self.where if self.where[other] == rank)):
                if rank != self.where[query] and self._gains(query, partner, rank):
                    return True
        return False

    def _gains(self, query: str, partner: str | None, rank: int) -> bool:
        back = self.where[query]
        shift = self._flops[query] - (self._flops[partner] if partner is not None else 0.0)
        if self.loads[rank] + shift > self.most or self.loads[back] - shift > self.most:
            return False
        more = self._moved(query, rank) + (self._moved(partner, back) if partner is not None else 0)
        if more >= 0:
            self._moved(query, back)
            if partner is not None:
                self._moved(partner, rank)
        return more < 0

    def _moved(self, query: str, rank: int) -> int:
        """Move it; the bytes that cross more now."""
        back, more = self.where[query], 0
        for index, _ in self._own[query]:
            self._counts[index][back] -= 1
            if not self._counts[index][back]:
                del self._counts[index][back]
        for index, nbytes in self._own[query]:
            count = self._counts[index]
            if count:
                more += nbytes * ((not count[rank]) - (not count[back]))
        self.loads[back] -= self._flops[query]
        self.put(query, rank)
        return more


def _even(flops: Mapping[str, float], processes: int) -> list[list[float]]:
    """The loads of a placement by FLOPs alone: the heaviest first, each where least is."""
    loads: list[list[float]] = [[] for _ in range(processes)]
    for one in sorted(flops.values(), reverse=True):
        min(loads, key=sum).append(one)
    return loads
