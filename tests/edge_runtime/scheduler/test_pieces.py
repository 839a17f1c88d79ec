"""Tensors that always go together, condensed to one piece: the same costs over fewer names."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.scheduler.costs import tensor_groups
from tests.edge_runtime.scheduler import strategies


@given(strategies.costs(), st.integers(1, 60_000))
def test_condensed_costs_are_the_same_costs_over_fewer_names(costs, piece_bytes):
    small = tensor_groups(costs, piece_bytes).costs
    assert set(small.queries) == set(costs.queries) and len(small.tensor_bytes) <= len(costs.tensor_bytes)
    for a, b in product(costs.queries, repeat=2):
        before, after = (one.queries[a].needed & one.queries[b].needed for one in (costs, small))
        assert small.moved_bytes(after) == costs.moved_bytes(before)
        assert small.resident_bytes(after) == costs.resident_bytes(before)


@given(st.data())
def test_a_piece_is_held_when_all_its_tensors_are_and_pieces_hold_every_tensor_once(data):
    costs = data.draw(strategies.costs())
    pieces = tensor_groups(costs, data.draw(st.integers(1, 60_000)))
    needed = {name for cost in costs.queries.values() for name in cost.needed}
    assert sorted(pieces.tensor_names(pieces.costs.tensor_bytes)) == sorted(needed)
    query = data.draw(st.sampled_from(list(costs.queries)))
    mine = pieces.costs.queries[query].needed
    assert set(pieces.tensor_names(mine)) == costs.queries[query].needed
    assert pieces.resident_groups(costs.queries[query].needed) >= mine
    for name in costs.queries[query].needed:
        assert not pieces.resident_groups(costs.queries[query].needed - {name}) >= mine
