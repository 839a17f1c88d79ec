"""Batch sizes: all frames in time, the room kept, and as good for the worst query as any combination."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.batches import batch_in_time, expected_round, largest_batches, worst_first_batches
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.scheduler.order import cycle_loads

BATCHES = (BatchCost(2, 0.030, 2000), BatchCost(4, 0.050, 4000))


def test_batch_in_time_late_frames_are_given_up():
    cost = QueryCost(("t",), 0.020, 1000, 0.1, BATCHES)
    assert batch_in_time((0.0, 0.01), 0.05, cost, 4).count == 2
    assert batch_in_time((0.0, 0.01), 0.08, cost, 4) == batch_in_time((0.0, 0.01), 0.08, cost, 1)
    found = batch_in_time((0.0, 0.04, 0.05), 0.075, cost, 4)
    assert (found.count, found.late) == (2, 1), "the oldest is given up for two that are in time together"
    assert batch_in_time((0.0,), 0.09, cost, 4) == type(found)(0, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted), st.floats(0, 1.2), st.integers(1, 4))
def test_batch_in_time_any_frames_is_the_largest(waiting, start, most):
    cost = QueryCost(("t",), 0.020, 1000, 0.1, BATCHES)
    found = batch_in_time(waiting, start, cost, most)
    taken = waiting[found.late : found.late + found.count]
    assert len(taken) == found.count <= most
    if taken:
        assert start + cost.run_of(found.count) <= taken[0] + cost.sla_s + 1e-6
    for count in range(found.count + 1, min(most, len(waiting)) + 1):
        assert start + cost.run_of(count) > waiting[-count] + cost.sla_s - 1e-6


def test_largest_batches_keep_the_budget():
    costs = Costs({"q": QueryCost(("t",), 0.02, 1000, 0.1, BATCHES)}, {"t": 512}, 1e6)
    assert [largest_batches(costs, 512 + room)["q"] for room in (1000, 2000, 3999, 4000)] == [1, 2, 2, 4]


def brute_force(costs: Costs, specs, order, budget: int) -> float:
    def worst(sizes) -> float:
        batches = dict(zip(order, sizes, strict=True))
        expected = expected_round(costs, specs, cycle_loads(costs, order, budget, batches), batches)
        return min(expected.per_second(query) / specs[query].fps for query in order)

    largest = largest_batches(costs, budget)
    return max(
        worst(sizes) for sizes in product(*([one for one in (1, 2, 4, 8) if one <= largest[query]] for query in order))
    )


@settings(max_examples=30)
@given(st.data())
def test_worst_first_batches_match_the_best_combination(data):
    queries, specs = {}, {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        run_s = data.draw(st.integers(5, 60)) / 1000
        saving = data.draw(st.sampled_from([0.3, 0.6, 1.0]))
        larger = tuple(BatchCost(count, run_s * (1 + saving * (count - 1)), 0) for count in (2, 4, 8))
        queries[name] = QueryCost((name, "all"), run_s, 0, data.draw(st.sampled_from([0.1, 0.4])), larger)
        specs[name] = QuerySpec(data.draw(st.sampled_from([5.0, 15.0, 30.0])))
    costs = Costs(queries, {"a": 2048, "b": 4096, "c": 1024, "all": 2048}, 1e5)
    budget, order = data.draw(st.sampled_from([6144, 7168, 16384])), tuple(queries)
    chosen = worst_first_batches(costs, specs, order, budget)
    expected = expected_round(costs, specs, cycle_loads(costs, order, budget, chosen), chosen)
    reached = min(expected.per_second(query) / specs[query].fps for query in order)
    assert reached == pytest.approx(brute_force(costs, specs, order, budget), rel=1e-6, abs=1e-9)
