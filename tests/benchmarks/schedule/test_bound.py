"""The bound on frames in time: no policy beats it, and by hand it is what must arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule.bound import least_s, upper_bound
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import simulate
from tests.edge_runtime.scheduler import strategies


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_policy_beats_the_bound(data):
    costs = data.draw(strategies.costs())
    budget = data.draw(strategies.budgets(costs))
    gaps = {query: data.draw(st.sampled_from([0.02, 0.05, 0.1, 0.3])) for query in costs.queries}
    arrivals = {
        query: [index * gap + data.draw(st.integers(0, 9)) / 1000 for index in range(20)] for query, gap in gaps.items()
    }
    fps = {query: 1 / min(b - a for a, b in pairwise(times)) for query, times in arrivals.items()}
    bound = upper_bound(costs, arrivals, fps, budget)
    for policy in POLICIES.values():
        played = simulate(costs, arrivals, budget, policy)
        assert sum(row["processed"] - row["late"] for row in played.per_query()) <= bound + 1e-6


def test_the_bound_is_what_arrives_when_there_is_room_and_time_for_all():
    costs = Costs({query: QueryCost((query,), 0.001, 0, 0.2) for query in "ab"}, {"a": 512, "b": 512}, 1e9)
    arrivals = {query: [index / 10 for index in range(50)] for query in "ab"}
    assert upper_bound(costs, arrivals, {"a": 10, "b": 10}, 4096) == pytest.approx(100)


def test_the_bound_counts_runs_and_the_loads_that_must_be():
    slow = Costs({"a": QueryCost(("a",), 0.2, 0, 0.3)}, {"a": 512}, 1e9)
    arrivals = {"a": [index / 10 for index in range(100)]}
    total_s = 9.9 + 0.3
    assert upper_bound(slow, arrivals, {"a": 10}, 4096) == pytest.approx(total_s / 0.2)
    swaps = Costs({query: QueryCost((query,), 0.001, 0, 0.1) for query in "ab"}, {"a": 10**6, "b": 10**6}, 1e6)
    both = {query: [index / 10 for index in range(100)] for query in "ab"}
    assert upper_bound(swaps, both, {"a": 10, "b": 10}, 1_000_448) < 120


def test_a_query_that_cannot_be_in_time_or_does_not_fit_adds_nothing():
    costs = Costs(
        {"late": QueryCost(("x",), 0.2, 0, 0.1), "large": QueryCost(("y",), 0.01, 0, 0.1)}, {"x": 512, "y": 5000}, 1e9
    )
    assert upper_bound(costs, {"late": [0.0], "large": [0.0]}, {"late": 1, "large": 1}, 1024) == 0


def test_only_batches_whose_frames_can_all_be_in_time_count():
    cost = QueryCost(("t",), 0.05, 0, 0.2, (BatchCost(2, 0.06, 0), BatchCost(4, 0.08, 0)))
    assert least_s(cost, 10) == pytest.approx(0.03), "a third frame comes 200 ms after the first"
    assert least_s(cost, 100) == pytest.approx(0.02)
