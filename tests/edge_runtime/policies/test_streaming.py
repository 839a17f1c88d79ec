"""Streaming within a budget: what stays, what a run copies, and when it is taken in place of swapping."""

from __future__ import annotations

import pytest

from gemel.edge_runtime.policies.streaming import frames_in_time, pick_overflow, stream_within
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost
from gemel.edge_runtime.scheduler.eviction import OverflowLayer, OverflowTensor

KIB = 1024
QUERIES = ("a", "b")
TIED, WORKSPACE, HEAD = ("t0", "t1", "t2", "t3"), 8 * KIB, 4 * KIB
SIZES = dict.fromkeys(TIED, 64 * KIB) | dict.fromkeys(QUERIES, HEAD)
SPECS = {query: QuerySpec(10.0) for query in QUERIES}


def layers_of(query: str) -> tuple[OverflowLayer, ...]:
    return tuple(OverflowLayer(name, (OverflowTensor(name, name, 0, SIZES[name]),)) for name in (*TIED, query))


def make_costs(rate: float = 4e6, sla_s: float = 0.1) -> Costs:
    """Two queries that tie four layers and have a head each; a pass for both takes 11 ms, a run 10 ms."""
    batches = (BatchCost(1, 0.01, WORKSPACE), BatchCost(2, 0.02, 2 * WORKSPACE))
    queries = {query: QueryCost.of_batches((*TIED, query), sla_s, batches) for query in QUERIES}
    joint = QueryCost.of_batches((), sla_s, (BatchCost(1, 0.01, WORKSPACE), BatchCost(2, 0.011, 2 * WORKSPACE)))
    return Costs(queries, SIZES, rate, joint=(JointCost(QUERIES, joint),))


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 2])
def test_streaming_keeps_what_fits_beside_the_workspace_and_scratch(kept: int, frames: int) -> None:
    costs, layers = make_costs(), {query: layers_of(query) for query in QUERIES}
    budget = 2 * HEAD + frames * WORKSPACE + (kept + 1) * 64 * KIB
    found = stream_within(costs, SPECS, budget, layers, QUERIES, frames)
    assert found is not None
    assert found.tensors["a"] == found.tensors["b"] and len(found.tensors["a"]) == len(TIED) - kept
    assert found.tensors["a"].isdisjoint(QUERIES), "what is private in a pass stays"
    copied = (len(TIED) - kept) * 64 * KIB
    assert found.run_bytes == dict.fromkeys(QUERIES, copied)
    (joint,) = found.costs.joint
    assert joint.cost.run_of(2) == pytest.approx(0.011 + copied / 4e6), "a pass copies once"
    assert found.costs.resident_bytes(found.costs.tensor_bytes) + joint.cost.workspace_of(frames) <= budget
    assert stream_within(costs, SPECS, 2 * HEAD + WORKSPACE + 63 * KIB, layers, QUERIES) is None


def test_streaming_is_taken_where_swapping_loses_frames() -> None:
    """A third query ties nothing: a swap copies three layers there and back, streaming its four layers once."""
    costs = make_costs(sla_s=0.09)
    other = tuple(f"o{index}" for index in range(4))
    sizes = SIZES | dict.fromkeys(other, 64 * KIB)
    queries = {**costs.queries, "c": QueryCost(other, 0.01, WORKSPACE, 0.09)}
    costs = Costs(queries, sizes, 4e6, joint=costs.joint)
    specs = {query: QuerySpec(10.0) for query in queries}

    def layers(query: str) -> tuple[OverflowLayer, ...]:
        if query != "c":
            return layers_of(query)
        return tuple(OverflowLayer(name, (OverflowTensor(name, name, 0, sizes[name]),)) for name in other)

    budget = 2 * HEAD + 2 * WORKSPACE + 5 * 64 * KIB
    found = pick_overflow(costs, specs, budget, layers)
    assert set(found.tensors) == set(queries) and sum(map(len, found.tensors.values())) > 0
    everything = sum(sizes.values()) + 8 * KIB + 9 * WORKSPACE
    assert not pick_overflow(costs, specs, everything, layers).tensors, "nothing is copied where all fits"
    unknown = {query: QueryCost(cost.tensors, 0.0, WORKSPACE, 0.09) for query, cost in queries.items()}
    assert not pick_overflow(Costs(unknown, sizes, 4e6), specs, budget, layers).tensors, "no times are known"


def test_copies_beside_runs_are_taken_where_they_bring_frames_in_time() -> None:
    names = tuple(f"o{index}" for index in range(4))
    costs = Costs({"c": QueryCost(names, 0.05, WORKSPACE, 0.09)}, dict.fromkeys(names, 64 * KIB), 4e6)
    layers = tuple(OverflowLayer(name, (OverflowTensor(name, name, 0, 64 * KIB),)) for name in names)
    specs, budget = {"c": QuerySpec(10.0)}, WORKSPACE + 2 * 64 * KIB
    serial, beside = (pick_overflow(costs, specs, budget, lambda _: layers, can) for can in (False, True))
    assert not serial.overlaps and serial.costs.queries["c"].run_s == pytest.approx(0.05 + 3 * 64 * KIB / 4e6)
    assert beside.overlaps and beside.costs.queries["c"].run_s == pytest.approx(5 * 64 * KIB / 4e6)
    assert [frames_in_time(one.costs, specs, budget) for one in (serial, beside)] == [0, 100]
