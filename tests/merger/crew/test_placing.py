"""Placing queries on processes: even loads, few bytes that cross, and nothing but a function of its input."""

from __future__ import annotations

import random

import pytest

from merger.distributed import SLACK, cut_bytes, partition


def test_queries_that_share_much_sit_together_where_loads_allow_it() -> None:
    flops = dict.fromkeys("abcd", 1.0)
    shares = [("ac", 100), ("bd", 100), ("abcd", 1)]
    assert partition(flops, shares, 2) == [["a", "c"], ["b", "d"]]
    assert cut_bytes([["a", "c"], ["b", "d"]], shares) == 1
    assert cut_bytes([["a", "b"], ["c", "d"]], shares) == 201


def test_even_loads_come_before_fewer_bytes() -> None:
    assert partition({"heavy": 3.0, "a": 1.0, "b": 1.0, "c": 1.0}, [(("heavy", "a", "b", "c"), 10**9)], 2) == [
        ["heavy"],
        ["a", "b", "c"],
    ]


def test_a_pair_changes_places_where_no_single_move_is_free() -> None:
    flops = {"a": 5.0, "b": 5.0, "c": 4.0, "d": 4.0}
    parts = partition(flops, [("ad", 1), ("bc", 1), ("cd", 1), ("ac", 9), ("bd", 9)], 2)
    assert parts == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_every_query_has_one_process_and_no_load_is_beyond_the_even_ones(processes: int) -> None:
    draws = random.Random(processes)
    flops = {f"q{index}": draws.choice((1.0, 2.0, 6.0)) for index in range(12)}
    shares = [(draws.sample(sorted(flops), 4), draws.randint(1, 9)) for _ in range(20)]
    parts = partition(flops, shares, processes)
    assert sorted(query for part in parts for query in part) == sorted(flops) and len(parts) == processes
    loads = [sum(flops[query] for query in part) for part in parts]
    assert max(loads) <= (1 + SLACK) * (sum(flops.values()) / processes + max(flops.values()))
    assert parts == partition(flops, shares, processes)
    in_turns = [[query for place, query in enumerate(flops) if place % processes == rank] for rank in range(processes)]
    assert processes == 1 or cut_bytes(parts, shares) < cut_bytes(in_turns, shares)


def test_processes_beyond_the_queries_have_none() -> None:
    assert partition({"a": 1.0, "b": 2.0}, [("ab", 5)], 3) == [["a"], ["b"], []]
