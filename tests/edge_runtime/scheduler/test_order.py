"""The order of a round: queries that share most are neighbours."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.scheduler.costs import Costs, QueryCost
from gemel.edge_runtime.scheduler.order import NextUse, cycle_loads, share_order
from tests.edge_runtime.scheduler import strategies


def adjacent_bytes(order, costs: Costs) -> int:
    return sum(
        costs.moved_bytes(costs.queries[a].needed & costs.queries[b].needed)
        for a, b in zip(order, (*order[1:], order[0]), strict=True)
    )


@given(strategies.costs())
def test_share_order_few_queries_is_the_best_permutation(costs):
    order = share_order(costs)
    assert sorted(order) == sorted(costs.queries)
    if len(order) <= 4:
        assert adjacent_bytes(order, costs) == max(adjacent_bytes(other, costs) for other in permutations(order))
    assert share_order(costs) == order


def test_share_order_most_shared_become_neighbours():
    queries = {"day-car": ("x", "h1"), "night-person": ("y", "h2"), "night-car": ("x", "h3"), "day-person": ("y", "h4")}
    costs = Costs(
        {query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()},
        {**dict.fromkeys(("x", "y"), 100_000), **dict.fromkeys(("h1", "h2", "h3", "h4"), 10)},
        1e6,
    )
    assert share_order(costs) == ("day-car", "night-car", "night-person", "day-person")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_share_order_few_queries_has_them_all(count):
    costs = Costs({f"q{i}": QueryCost(("t",), 0.01, 0, 0.1) for i in range(count)}, {"t": 1}, 1e6)
    assert len(share_order(costs)) == count


@given(strategies.costs(), st.randoms(use_true_random=False))
def test_tensors_needed_last_come_first(costs, random):
    order = random.sample(list(costs.queries), len(costs.queries))
    query, *coming = order
    resident = frozenset(random.sample(sorted(costs.tensor_bytes), random.randint(0, len(costs.tensor_bytes))))
    groups = list(NextUse().of(costs, coming, (query,), resident))
    needed = [costs.queries[other].needed for other in coming]

    def next_turn(name: str) -> int:
        return next((turn for turn, names in enumerate(needed) if name in names), len(order))

    assert {name for group in groups for name in group} == resident - costs.queries[query].needed
    turns = [{next_turn(name) for name in group} for group in groups]
    assert all(len(turn) == 1 for turn in turns)
    assert [turn for (turn,) in turns] == sorted({turn for (turn,) in turns}, reverse=True)


def round_bytes(costs: Costs, order, budget: int, rounds: int = 4) -> int:
    """Bytes that the last of several rounds moves, by Belady's rule over a written-out future."""
    turns = [query for _ in range(rounds + 2) for query in order]
    resident: set[str] = set()
    moved = 0
    for step in range(rounds * len(order)):
        cost = costs.queries[turns[step]]
        missing = cost.needed - resident
        resident |= missing

        def next_use(name: str, step: int = step) -> tuple[int, str]:
            later = (at for at in range(step + 1, len(turns)) if name in costs.queries[turns[at]].needed)
            return next(later, len(turns)), name

        for name in sorted(resident - cost.needed, key=next_use, reverse=True):
            if costs.resident_bytes(resident) + cost.workspace_bytes <= budget:
                break
            resident.remove(name)
        moved += costs.moved_bytes(missing) if step >= (rounds - 1) * len(order) else 0
    return moved


@given(st.data())
def test_cycle_loads_settled_round_is_within_bounds(data):
    """Equal sizes: with unequal ones Belady's rule may settle in cycles of several rounds."""
    costs = data.draw(strategies.costs())
    costs = Costs(costs.queries, dict.fromkeys(costs.tensor_bytes, 4096), 1e6)
    budget = max(map(costs.alone_bytes, costs.queries)) + data.draw(st.integers(0, 8)) * 4096
    order = share_order(costs)
    loads = cycle_loads(costs, order, budget)
    everything = costs.resident_bytes(costs.tensor_bytes.keys())
    if everything + max(cost.workspace_bytes for cost in costs.queries.values()) <= budget:
        assert not any(loads.values()) and round_bytes(costs, order, budget) == 0
    assert all(0 <= nbytes <= costs.moved_bytes(costs.queries[query].needed) for query, nbytes in loads.items())
