"""What a tensor occupies and what a load moves and takes."""

from __future__ import annotations

import pytest
from hypothesis import given

from edge_runtime.memory.allocator import footprint_bytes
from edge_runtime.scheduler.costs import Costs, QueryCost, unshared_costs
from tests.edge_runtime.scheduler import strategies


def two_queries() -> Costs:
    return Costs(
        {"a": QueryCost(("s", "x"), 0.01, 100, 0.1), "b": QueryCost(("s",), 0.02, 900, 0.1)},
        {"s": 1000, "x": 512},
        copy_bytes_per_s=1e6,
        load_latency_s=0.001,
    )


def test_a_resident_tensor_occupies_whole_units_of_512_bytes():
    assert [footprint_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_a_load_moves_stored_bytes_and_occupies_footprints():
    costs = two_queries()
    assert costs.moved_bytes(("s", "x")) == 1512
    assert costs.weights_bytes("a") == 1024 + 512
    assert costs.alone_bytes("b") == 1024 + 900


def test_a_load_costs_its_latency_once_and_nothing_when_nothing_is_missing():
    costs = two_queries()
    assert costs.load_s(0) == 0
    assert costs.load_s(1000) == pytest.approx(0.002)


def test_costs_refuse_a_tensor_of_unknown_size():
    with pytest.raises(ValueError, match="query a"):
        Costs({"a": QueryCost(("t",), 0.01, 0, 0.1)}, {}, 1e6)


def test_measured_costs_replace_one_run_time_and_the_copy_rate():
    costs = two_queries().with_measured("b", 0.5, 2e6)
    assert (costs.queries["a"].run_s, costs.queries["b"].run_s, costs.copy_bytes_per_s) == (0.01, 0.5, 2e6)


@given(strategies.costs())
def test_costs_apart_share_nothing_and_weigh_the_same_alone(costs):
    alone = unshared_costs(costs)
    for query, cost in costs.queries.items():
        assert alone.weights_bytes(query) == costs.weights_bytes(query)
        assert alone.moved_bytes(alone.queries[query].tensors) == costs.moved_bytes(cost.tensors)
        assert not any(
            alone.queries[query].needed & alone.queries[other].needed for other in costs.queries if other != query
        )
