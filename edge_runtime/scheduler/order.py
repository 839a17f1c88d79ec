"""The cyclic order of turns, the bytes that a round of it moves, and which tensors it needs last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush

import numpy as np

from gemel.edge_runtime.scheduler.costs import Costs

EXCHANGE_PASSES = 20
ROUNDS = 2
"""Rounds of the cycle that are played until it is settled."""


def share_order(costs: Costs) -> tuple[str, ...]:
    """The paper's order of turns: neighbours share as many bytes as a greedy chain with 2-opt exchanges finds.

    Deterministic: ties go to the query listed first. Starts with the query listed first.
    """
    queries = list(costs.queries)
    shared = _shared_bytes(costs, queries)
    chain, left = [0], np.ones(len(queries), bool)
    left[0] = False
    while left.any():
        following = int(np.argmax(np.where(left, shared[chain[-1]], -1.0)))
        left[following] = False
        chain.append(following)
    return tuple(queries[index] for index in _two_opt(np.array(chain), shared))


def _shared_bytes(costs: Costs, queries: Sequence[str]) -> np.ndarray:
    """Bytes that each two queries share, (queries, queries)."""
    users: dict[str, list[int]] = {}
    for index, query in enumerate(queries):
        for name in costs.queries[query].needed:
            users.setdefault(name, []).append(index)
    by_users: dict[tuple[int, ...], int] = {}
    for name, using in users.items():
        if len(using) > 1:
            by_users[tuple(using)] = by_users.get(tuple(using), 0) + costs.tensor_bytes[name]
    shared = np.zeros((len(queries), len(queries)))
    for using, nbytes in by_users.items():
        shared[np.ix_(using, using)] += nbytes
    return shared


def _two_opt(cycle: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Reverse stretches of the cycle as long as that puts more shared bytes side by side (Croes, 1958)."""
    size = len(cycle)
    for _ in range(EXCHANGE_PASSES if size > 3 else 0):
        improved = False
        for i in range(size - 2):
            a, b = cycle[i], cycle[i + 1]
            ends = np.arange(i + 2, size - (i == 0))
            c, d = cycle[ends], cycle[(ends + 1) % size]
            gain = shared[a, c] + shared[b, d] - shared[a, b] - shared[c, d]
            if len(gain) and gain.max() > 0:
                j = int(ends[gain.argmax()])
                cycle[i + 1 : j + 1] = cycle[i + 1 : j + 1][::-1].copy()
                improved = True
        if not improved:
            break
    return cycle


def cycle_loads(
    costs: Costs, order: Sequence[str], budget_bytes: int, batches: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Bytes that each query's turn moves in a settled round of the cycle, what is needed last being evicted first.

    Belady's rule (1966) over a future that is known: the cycle. `batches` sets the workspace to keep free, one frame
    unless given. A query that does not fit moves nothing.
    """
    turns: dict[str, list[int]] = {}
    for place, query in enumerate(order):
        for name in costs.queries[query].needed:
            turns.setdefault(name, []).append(place)
    size, moved = len(order), dict.fromkeys(order, 0)
    next_use: dict[str, int] = {}
    furthest: list[tuple[int, str]] = []
    resident: set[str] = set()
    used = 0
    for step in range(ROUNDS * size):
        place = step % size
        query = order[place]
        cost = costs.queries[query]
        room = budget_bytes - cost.workspace_of(min(cost.largest, (batches or {}).get(query, 1)))
        missing = [name for name in cost.tensors if name not in resident]
        used += costs.resident_bytes(missing)
        held = []
        while used > room and furthest:
            at, name = heappop(furthest)
            if name not in resident or next_use[name] != -at:
                continue
            if name in cost.needed:
                held.append((at, name))
                continue
            resident.remove(name)
            used -= costs.footprints[name]
        for entry in held:
            heappush(furthest, entry)
        if used > room:
            used -= costs.resident_bytes(missing)
            moved[query] = 0
            continue
        resident.update(missing)
        moved[query] = costs.moved_bytes(missing)
        for name in cost.needed:
            uses = turns[name]
            later = bisect_right(uses, place)
            next_use[name] = step - place + (uses[later] if later < len(uses) else size + uses[0])
            heappush(furthest, (-next_use[name], name))
        if len(furthest) > 4 * len(resident) + 64:
            furthest = [(-next_use[name], name) for name in resident]
            heapify(furthest)
    return moved


class NextUse:
    """Which resident tensors are needed when, looked up in every decision; which queries need each is worked out once,
    as an array of their numbers.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """Of the queries; one more stands for none."""
        self._rows: dict[str, int] = {}
        """By tensor that a query needs, its row in `_users`, (tensors, most queries of a tensor)."""
        self._users = np.empty((0, 0), np.intp)

    def of(
        self, costs: Costs, coming: Sequence[str], queries: Sequence[str], resident: Set[str]
    ) -> Iterator[tuple[str, ...]]:
        """The resident tensors that `queries` do not need, those needed at the same time together, the last needed
        first.

        `coming` are the other queries at least, in the order of their next turns; a tensor that several need counts as
        needed when the first of them has its turn. Tensors that no query needs come before all others. Each group is in
        load order. Between calls only times of `costs` differ.
        """
        if not self._rows:
            self._number(costs)
        rows = self._rows
        if unused := sorted(name for name in resident if name not in rows and name in costs.tensor_bytes):
            yield tuple(unused)
        turns = np.full(len(self._numbers) + 1, len(coming))
        turns[[self._numbers[query] for query in coming]] = np.arange(len(coming))
        first = turns[self._users].min(1).tolist()
        evictable: dict[str, int] = {name: first[rows[name]] for name in resident if name in rows}
        for query in queries:
            for name in costs.queries[query].tensors:
                evictable.pop(name, None)
        for turn in sorted({turn for turn in evictable.values() if turn < len(coming)}, reverse=True):
            yield tuple(name for name in costs.queries[coming[turn]].tensors if evictable.get(name) == turn)

    def _number(self, costs: Costs) -> None:
        users: dict[str, list[int]] = {}
        for number, (query, cost) in enumerate(costs.queries.items()):
            self._numbers[query] = number
            for name in cost.tensors:
                users.setdefault(name, []).append(number)
        self._users = np.full((len(users), max(map(len, users.values()), default=1)), len(self._numbers))
        for row, (name, needing) in enumerate(users.items()):
            self._rows[name] = row
            self._users[row, : len(needing)] = needing
