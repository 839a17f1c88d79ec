"""The simulator: frames add up, bytes are exact, the budget holds."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import age_p95_ms, arrival_rate, simulate
from tests.edge_runtime.scheduler import strategies

KIB = 1024
OURS = POLICIES["adaptive"]


def two_queries(sla_s: float = 0.1) -> Costs:
    """Each query: 10,240 bytes of its own, 10.24 ms to load and 5 ms to run."""
    return Costs({query: QueryCost((query,), 0.005, KIB, sla_s) for query in "ab"}, {"a": 10240, "b": 10240}, 1e6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_simulate_any_workload_balances_frames_and_keeps_the_budget(data):
    policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
    costs = data.draw(strategies.costs())
    budget = data.draw(strategies.budgets(costs))
    arrivals = data.draw(strategies.arrivals(costs))
    result = simulate(costs, arrivals, budget, policy)
    again = simulate(costs, arrivals, budget, policy)
    assert (again.frames, again.changes) == (result.frames, result.changes)
    costs = result.costs
    assert result.ledger.balanced
    outcomes = Counter((frame.query, frame.outcome) for frame in result.frames)
    reasons = Counter((frame.query, frame.reason) for frame in result.frames if frame.reason)
    for account in result.ledger.to_json():
        query = account["query"]
        assert account["received"] == len(arrivals[query])
        assert account["processed"] == outcomes[query, "processed"] and account["late"] == 0
        assert account["pending"] == outcomes[query, "pending"] == 0
        assert account["dropped"] == {reason: n for (of, reason), n in reasons.items() if of == query}
    resident: frozenset[str] = frozenset()
    moved = 0
    for change in result.changes:
        after = (resident - set(change.evicted)) | set(change.loaded)
        assert costs.queries[change.query].needed <= after
        moved += costs.moved_bytes(after - resident)
        resident = after
        assert change.resident_bytes == costs.resident_bytes(after)
        assert change.resident_bytes + costs.queries[change.query].workspace_bytes <= budget
    assert moved == result.bytes_moved
    assert result.max_used_bytes <= budget
    busy = sorted((f.started_at, f.finished_at) for f in result.frames if f.started_at and f.finished_at)
    assert all(first[1] <= then[0] for first, then in pairwise(busy)), "one run at a time"
    for frame in result.frames:
        if frame.finished_at is not None:
            assert frame.finished_at - frame.captured_at <= costs.queries[frame.query].sla_s + 1e-9


def test_simulate_memory_for_all_loads_each_once():
    times = [i / 10 for i in range(20)]
    result = simulate(two_queries(), {"a": times, "b": times}, 64 * KIB, OURS)
    assert (result.bytes_moved, result.swaps) == (20480, 2)
    assert all(frame.outcome == "processed" for frame in result.frames)


def test_simulate_memory_for_one_swaps_every_turn():
    times = [i / 10 for i in range(20)]
    result = simulate(two_queries(), {"a": times, "b": times}, 11 * KIB, OURS)
    assert result.swaps == 40 and result.bytes_moved == 40 * 10240
    assert all(frame.outcome == "processed" for frame in result.frames)


def test_simulate_shared_tensor_moves_once():
    costs = Costs(
        {query: QueryCost(("shared", query), 0.005, 0, 0.1) for query in "ab"},
        {"shared": 10240, "a": 512, "b": 512},
        1e6,
    )
    result = simulate(costs, {"a": [0.0, 0.2], "b": [0.1, 0.3]}, 10240 + 512, OURS)
    assert result.bytes_moved == 10240 + 4 * 512


def test_simulate_frames_during_a_load_run_together():
    larger = (BatchCost(2, 0.006, KIB),)
    costs = Costs({"a": QueryCost(("a",), 0.005, KIB, 0.1, larger)}, {"a": 10240}, 1e6)
    result = simulate(costs, {"a": [0.0, 0.001, 0.011]}, 64 * KIB, OURS, {"a": QuerySpec(300.0)})
    assert [frame.outcome for frame in result.frames] == ["processed"] * 3
    assert result.frames[0].finished_at == pytest.approx(0.01024 + 0.005)
    assert result.frames[1].finished_at == result.frames[2].finished_at == pytest.approx(0.01524 + 0.006)


def test_simulate_load_longer_than_sla_still_runs():
    result = simulate(two_queries(sla_s=0.008), {"a": [i / 1000 for i in range(100)]}, 64 * KIB, OURS)
    account = result.per_query()[0]
    assert account["processed"] > 10
    assert result.frames[0].outcome == "dropped"


def test_simulate_until_leaves_frames_pending():
    result = simulate(two_queries(), {"a": [0.0, 0.5], "b": [0.0]}, 64 * KIB, OURS, until_s=0.01)
    assert [(f.query, f.outcome) for f in result.frames] == [("a", "processed"), ("b", "pending")]
    assert result.ledger.balanced


def test_per_query_figures_come_from_the_frames():
    result = simulate(two_queries(), {"a": [0.0, 1.0]}, 64 * KIB, OURS)
    assert result.per_query()[0] == {
        "id": "a",
        "received": 2,
        "processed": 2,
        "late": 0,
        "dropped": 0,
        "dropped_by": {},
        "age_p95_ms": 15.24,
    }
    assert result.per_query()[1]["age_p95_ms"] is None


def test_age_p95_ms_is_by_nearest_rank():
    assert age_p95_ms(i / 1000 for i in range(1, 101)) == 95
    assert age_p95_ms([]) is None


def test_arrival_rate_spans_first_to_last():
    assert arrival_rate([1.0, 1.5, 2.0]) == 2.0
    assert arrival_rate([1.0]) == arrival_rate([]) == 1.0


def test_simulate_lost_frame_is_dropped_in_the_end():
    queries = {"q1": QueryCost(("a", "b"), 0.018, 1, 0.3), "q2": QueryCost(("c",), 0.001, 1, 0.02)}
    costs = Costs(queries, {"a": 1, "b": 7168, "c": 5951}, 1e6)
    arrivals = {"q1": [0.0, 0.5, 0.882], "q2": [0.883]}
    result = simulate(costs, arrivals, 8192, POLICIES["adaptive"])
    assert [(frame.query, frame.outcome) for frame in result.frames if frame.outcome != "processed"] == [
        ("q2", "dropped")
    ]
    assert result.ledger.balanced
