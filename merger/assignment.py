"""Which rank holds which queries, and in which order gradients of queries are added.

All queries stand in one order in which those that could share much are neighbours; it depends on nothing but them. A
rank holds neighbours. Gradients are added along a binary tree over that order, so a sum has the same bits on any number
of ranks, and a rank sends one partial sum for each subtree that is its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Node = tuple[int, ...]
"""A subtree, by the places of its members; of a partition, the first place and that behind the last."""
Tree = Mapping[Node, tuple[Node, Node]]
SLACK = 1.05
"""How much fuller than possible the fullest rank may be, where fewer bytes are held twice then."""


@dataclass(frozen=True)
class QueryLoad:
    """What a query asks of its rank: FLOPs of a frame, bytes, and those of each kind of layer that could be shared."""

    flops: float
    nbytes: int
    kinds: Mapping[str, int]

    def bytes_in_common(self, other: QueryLoad) -> int:
        """Bytes that one copy could save."""
        return sum(min(nbytes, other.kinds.get(kind, 0)) for kind, nbytes in self.kinds.items())


def order_queries(loads: Mapping[str, QueryLoad]) -> list[str]:
    """The queries, each followed by the one that has most bytes in common with it; the first stays the first."""
    left = list(loads)
    ordered = left[:1]
    del left[:1]
    while left:
        last = loads[ordered[-1]]
        ordered.append(max(left, key=lambda query: last.bytes_in_common(loads[query])))
        left.remove(ordered[-1])
    return ordered


def partition(loads: Mapping[str, QueryLoad], size: int) -> list[list[str]]:
    """The queries of each rank, neighbours in the order of `loads`; ranks beyond the number of queries have none.

    No partition into neighbours has a fullest rank that is less full, by its part of all FLOPs or of all bytes; among
    those within SLACK of it this one holds the fewest bytes, counting what a rank's queries could share once.
    """
    queries, ranks = list(loads), min(size, len(loads))
    held, full = _measure_neighbours(list(loads.values()))
    fullest, _ = _cut(len(queries), ranks, lambda before, node: max(before, full[node]))
    _, ends = _cut(
        len(queries), ranks, lambda before, node: before + held[node] if full[node] <= SLACK * fullest else math.inf
    )
    parts = [queries[first:last] for first, last in zip([0, *ends], ends)]
    return parts + [[] for _ in range(size - ranks)]


def _measure_neighbours(loads: Sequence[QueryLoad]) -> tuple[dict[Node, int], dict[Node, float]]:
    """Neighbours -> the bytes that they hold, with what they could share once, and how full they make a rank."""
    held, full = dict[Node, int](), dict[Node, float]()
    flops, nbytes = (max(1, sum(values)) for values in zip(*((load.flops, load.nbytes) for load in loads)))
    for first in range(len(loads)):
        kinds, private = Counter[str](), 0
        for last, load in enumerate(loads[first:], first + 1):
            kinds |= Counter(load.kinds)
            private += load.nbytes - sum(load.kinds.values())
            own = loads[first:last]
            held[first, last] = private + kinds.total()
            full[first, last] = max(sum(one.flops for one in own) / flops, sum(one.nbytes for one in own) / nbytes)
    return held, full


def _cut(count: int, ranks: int, add: Callable[[float, Node], float]) -> tuple[float, list[int]]:
    """The least cost of `count` places in so many parts, and where these end: dynamic programming over the last end."""
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(math.inf, [])] * count]
    for _ in range(ranks):
        best = [
            min(((add(best[first][0], (first, last)), [*best[first][1], last]) for first in range(last)),
                default=(math.inf, []), key=lambda one: one[0])
            for last in range(count + 1)
        ]  # fmt: skip
    return best[-1]


def sum_tree(members: Node, first: int, last: int) -> Tree:
    """Members of a subtree -> those of its sibling, to whose sum its own is added, and those of both.

    `members` are some of the places first <= place < last, in order. Each half of the places is a subtree.
    """
    middle = (first + last) // 2
    left = tuple(place for place in members if place < middle)
    right = members[len(left) :]
    if len(members) < 2:
        return {}
    pairs = {left: (right, members), right: (left, members)} if left and right else {}
    return {**sum_tree(left, first, middle), **sum_tree(right, middle, last), **pairs}


def climb(tree: Tree, known: dict[Node, T], leaf: Node, value: T, add: Callable[[T, T], T]) -> None:
    """Take up a value, and add what is known of its siblings as far up the tree as possible."""
    while leaf in tree and tree[leaf][0] in known:
        sibling, both = tree[leaf]
        leaf, value = both, add(known.pop(sibling), value)
    known[leaf] = value


def subtrees(tree: Tree, members: Sequence[int]) -> list[Node]:
    """The largest subtrees that consist of these members."""
    known = dict[Node, None]()
    for place in members:
        climb(tree, known, (place,), None, lambda one, other: None)
    return sorted(known)
