"""Which rank holds which queries, and the tree along which gradients are added."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gemel.merger.assignment import SLACK, QueryLoad, climb, order_queries, partition, subtrees, sum_tree

KINDS = st.dictionaries(st.sampled_from("xyz"), st.integers(1, 50))
LOADS = st.lists(st.builds(lambda flops, more, kinds: QueryLoad(flops, more + sum(kinds.values()), kinds),
                           st.floats(1, 100), st.integers(1, 50), KINDS), min_size=1, max_size=6)  # fmt: skip
MEMBERS = st.sets(st.integers(0, 12), min_size=1).map(lambda places: tuple(sorted(places)))


def fullness(own: Sequence[QueryLoad], every: Sequence[QueryLoad]) -> float:
    """The part of all FLOPs or of all bytes, whichever is more."""
    return max(
        sum(one.flops for one in own) / sum(one.flops for one in every),
        sum(one.nbytes for one in own) / sum(one.nbytes for one in every),
    )


def held_bytes(own: Sequence[QueryLoad]) -> int:
    """Bytes with what is shared once."""
    kinds = Counter[str]()
    for one in own:
        kinds |= Counter(one.kinds)
    return kinds.total() + sum(one.nbytes - sum(one.kinds.values()) for one in own)


@given(LOADS, st.integers(1, 4))
def test_partition_is_the_best_of_all_into_neighbours(loads: list[QueryLoad], size: int) -> None:
    named = {f"q{index}": load for index, load in enumerate(loads)}
    parts = partition(named, size)
    assert len(parts) == size and [query for part in parts for query in part] == list(named)
    ranks = min(size, len(loads))
    cuts = [(0, *ends, len(loads)) for ends in itertools.combinations(range(1, len(loads)), ranks - 1)]
    options = [[loads[first:last] for first, last in itertools.pairwise(cut)] for cut in cuts]
    fullest = {index: max(fullness(own, loads) for own in option) for index, option in enumerate(options)}
    found = [[named[query] for query in part] for part in parts if part]
    least = min(fullest.values())
    assert max(fullness(own, loads) for own in found) <= SLACK * least + 1e-9
    near = [options[index] for index, full in fullest.items() if full <= SLACK * least - 1e-9]
    assert all(sum(map(held_bytes, found)) <= sum(map(held_bytes, option)) for option in near)


def test_order_puts_those_that_share_next_to_each_other() -> None:
    kinds = {"a": {"x": 10}, "b": {"y": 20}, "c": {"x": 10, "z": 1}, "d": {"y": 20}}
    loads = {query: QueryLoad(1.0, 30, own) for query, own in kinds.items()}
    assert order_queries(loads) == ["a", "c", "b", "d"]
    assert partition({query: loads[query] for query in order_queries(loads)}, 2) == [["a", "c"], ["b", "d"]]


@given(MEMBERS, st.randoms())
def test_sum_along_the_tree_is_the_same_in_any_order_and_partition(members: tuple[int, ...], draws) -> None:
    tree = sum_tree(members, 0, 13)

    def add(leaves: Sequence[tuple[tuple[int, ...], str]]) -> dict[tuple[int, ...], str]:
        known = dict[tuple[int, ...], str]()
        for node, text in leaves:
            climb(tree, known, node, text, lambda one, other: f"({min(one, other)}+{max(one, other)})")
        return known

    whole = add([((place,), f"{place:02}") for place in members])
    assert list(whole) == [members]
    owners = {place: draws.randrange(3) for place in members}
    partial = list[tuple[tuple[int, ...], str]]()
    for rank in range(3):
        own = [place for place in members if owners[place] == rank]
        sums = add([((place,), f"{place:02}") for place in own])
        assert sorted(sums) == subtrees(tree, own)
        partial += sums.items()
    draws.shuffle(partial)
    assert add(partial) == whole


@given(st.integers(0, 3), st.integers(0, 3))
def test_neighbours_that_fill_a_subtree_have_one_partial_sum(depth: int, part: int) -> None:
    size = 8 >> depth
    first = size * (part % (8 // size))
    assert len(subtrees(sum_tree(tuple(range(8)), 0, 8), range(first, first + size))) == 1
