"""Layer streaming on paper: copies hide behind runs as far as a window allows, and what is kept need not be copied."""

from __future__ import annotations

import pytest

from benchmarks.schedule.streamed import StreamedLayer, pipelined_s, stream_costs
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import simulate

MB = 10**6
RATE = 100 * MB


def two(shared: bool) -> tuple[Costs, dict[str, tuple[StreamedLayer, ...]], dict[str, QuerySpec]]:
    """Two queries of four layers of 10 MB and 10 ms each, whose weights are their own or the same."""
    names = {query: [f"{'' if shared else query}{index}" for index in range(4)] for query in "ab"}
    queries = {
        query: QueryCost(tuple(own), 0.04, MB, 1.0, (BatchCost(2, 0.08, 2 * MB),)) for query, own in names.items()
    }
    sizes = dict.fromkeys((name for own in names.values() for name in own), 10 * MB)
    layers = {query: tuple(StreamedLayer((name,), 0.25) for name in own) for query, own in names.items()}
    return Costs(queries, sizes, RATE), layers, dict.fromkeys("ab", QuerySpec(1.0))


def test_pipelined_s_copies_during_runs():
    assert pipelined_s([(RATE, 1.0), (RATE, 1.0), (RATE, 1.0)], RATE, 2 * RATE) == pytest.approx(4.0)


def test_pipelined_s_full_window_waits():
    slices = [(RATE, 5.0), (RATE, 1.0), (RATE, 1.0)]
    assert pipelined_s(slices, RATE, RATE) == pytest.approx(1 + 5 + 1 + 1 + 1 + 1), "one after the other"
    assert pipelined_s(slices, RATE, 2 * RATE) == pytest.approx(1 + 5 + 1 + 1), "the third starts when the first is run"
    assert pipelined_s(slices, RATE, 3 * RATE) == pytest.approx(1 + 5 + 1 + 1)


def test_pipelined_s_kept_slice_is_not_copied():
    assert pipelined_s([(0, 1.0), (RATE, 1.0), (0, 1.0)], RATE, RATE) == pytest.approx(3.0)


def test_stream_costs_run_time_is_within_its_bounds():
    costs, layers, demands = two(shared=False)
    for budget in range(5, 90, 5):
        streamed = stream_costs(costs, demands, budget * MB, layers)
        for query, cost in streamed.costs.queries.items():
            copy_s = streamed.run_bytes[query] / RATE
            assert max(0.04, copy_s) <= cost.run_s + 1e-9 <= 0.04 + copy_s + 2e-9
            assert cost.run_of(2) >= 0.08 - 1e-9


def test_stream_costs_more_memory_is_not_slower():
    costs, layers, demands = two(shared=False)
    taken = [
        sum(one.run_s for one in stream_costs(costs, demands, budget * MB, layers).costs.queries.values())
        for budget in (10, 20, 40, 60, 82)
    ]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[-1] == pytest.approx(0.08)
    assert stream_costs(costs, demands, 82 * MB, layers).run_bytes == {"a": 0, "b": 0}


def test_stream_costs_shared_slices_are_kept_once():
    (apart, layers, demands), (shared, same, _) = two(shared=False), two(shared=True)
    alone, together = (stream_costs(one, demands, 30 * MB, of) for one, of in ((apart, layers), (shared, same)))
    assert sum(together.run_bytes.values()) < 0.7 * sum(alone.run_bytes.values())


def test_stream_costs_run_within_the_budget():
    costs, layers, demands = two(shared=False)
    streamed = stream_costs(costs, demands, 30 * MB, layers)
    frames = {query: [index + place / 2 for index in range(9)] for place, query in enumerate("ab")}
    played = simulate(streamed.costs, frames, 30 * MB, POLICIES["gemel"], demands)
    assert all(row["processed"] >= 8 for row in played.per_query())
    assert played.max_used_bytes <= 30 * MB
    assert played.bytes_moved == sum(streamed.costs.tensor_bytes.values()), "what is kept is loaded once"


def test_stream_costs_unused_tensor_is_refused():
    costs, layers, demands = two(shared=False)
    with pytest.raises(ValueError, match="no layer uses"):
        stream_costs(costs, demands, 30 * MB, {**layers, "a": layers["a"][1:]})
