"""Eviction, and which tensors of a query too large for the budget stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler import Plan, SchedulerState
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.scheduler.eviction import (
    MIN_OVERFLOW_BYTES,
    OverflowLayer,
    OverflowTensor,
    overflow_of,
    pick_evictions,
    scratch_bytes,
)
from gemel.edge_runtime.simulation.simulator import simulate
from tests.edge_runtime.scheduler import strategies

RATE = 1e6


def align(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Costs, dict[str, tuple[OverflowLayer, ...]], int]:
    """Costs of up to three queries over common tensors, some of them packed, their layers, and a budget."""
    count = draw(st.integers(2, 12))
    sizes = {f"t{index}": draw(st.integers(1, 200_000)) for index in range(count)}
    widened = {name for name in sizes if draw(st.booleans())}
    layers, queries = {}, {}
    for query in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        own = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, unique=True))
        parts = [
            OverflowTensor(
                name,
                name,
                4 * align(sizes[name]) if name in widened else 0,
                (4 if name in widened else 1) * align(sizes[name]),
            )
            for name in own
        ]
        made: list[OverflowLayer] = []
        for index, part in enumerate(parts):
            outer = (0,) if index and draw(st.booleans()) else ()
            made.append(OverflowLayer(f"l{index}", (part,), outer, draw(st.integers(1, 3))))
        layers[query] = tuple(made)
        workspace = scratch_bytes(made) + draw(st.integers(0, 50_000))
        larger = (BatchCost(2, 0.03, 2 * workspace),)
        queries[query] = QueryCost(tuple(own), 0.02, workspace, 1.0, larger)
    needed = {name for cost in queries.values() for name in cost.tensors}
    costs = Costs(queries, {name: sizes[name] for name in sorted(needed)}, RATE)
    return costs, layers, draw(st.integers(1, 2 * max(map(costs.alone_bytes, queries))))


@given(boxes())
def test_overflow_of_fits_the_budget_and_keeps_the_rest(box):
    costs, layers, budget = box
    asked = []
    found = overflow_of(costs, budget, lambda query: asked.append(query) or layers[query])
    assert set(asked) == {query for query in costs.queries if costs.alone_bytes(query) > budget}
    assert set(asked) == {*found.tensors, *found.lacking} and not found.tensors.keys() & found.lacking.keys()
    for query, before in costs.queries.items():
        after = found.costs.queries[query]
        if query not in found.tensors:
            assert after == before
            continue
        assert found.costs.alone_bytes(query) <= budget
        assert found.tensors[query] and after.needed == before.needed - found.tensors[query]
        assert after.tensors == tuple(name for name in before.tensors if name in after.needed)
        assert all(costs.tensor_bytes[name] >= MIN_OVERFLOW_BYTES for name in found.tensors[query])
    assert set(found.costs.tensor_bytes) == {name for cost in found.costs.queries.values() for name in cost.needed}


@given(boxes(), st.booleans())
def test_overflow_of_adds_copies_and_scratch(box, overlaps):
    costs, layers, budget = box
    found = overflow_of(costs, budget, layers.__getitem__, overlaps)
    assert found.overlaps == overlaps
    for query, overflow in found.tensors.items():
        before, after, own = costs.queries[query], found.costs.queries[query], layers[query]
        nbytes = sum(
            layer.times * costs.tensor_bytes[part.tensor]
            for layer in own
            for part in layer.parts
            if part.tensor in overflow
        )
        assert found.run_bytes[query] == nbytes
        more = (1 + overlaps) * scratch_bytes(own, overflow) - scratch_bytes(own)
        largest = max(costs.tensor_bytes[name] for name in overflow)
        for count in (1, 2):
            run_s, copy_s = before.run_of(count), nbytes / RATE
            expected = max(run_s, copy_s) + largest / RATE if overlaps else run_s + copy_s
            assert after.run_of(count) == pytest.approx(expected)
            assert after.workspace_of(count) == before.workspace_of(count) + more


@given(boxes())
def test_overflow_of_is_minimal_and_names_what_suffices(box):
    costs, layers, budget = box
    found = overflow_of(costs, budget, layers.__getitem__)
    for query, overflow in found.tensors.items():
        for name in overflow:
            fewer = overflow - {name}
            workspace = (
                costs.queries[query].workspace_bytes
                - scratch_bytes(layers[query])
                + scratch_bytes(layers[query], fewer)
            )
            kept = costs.queries[query].needed - fewer
            assert costs.resident_bytes(kept) + workspace > budget
    for query, least in found.lacking.items():
        assert least > budget
        assert query not in overflow_of(costs, least, layers.__getitem__).lacking


def test_overflow_of_query_too_large_is_lacking():
    costs = Costs({"a": QueryCost(("t",), 0.0, 100, 1.0), "b": QueryCost(("t",), 0.0, 0, 1.0)}, {"t": 512}, 1.0)
    found = [overflow_of(costs, budget, lambda _: chain({"t": 512})).lacking for budget in (612, 611, 511)]
    assert found == [{}, {"a": 612}, {"a": 612, "b": 512}]


def chain(sizes: dict[str, int], **times: int) -> tuple[OverflowLayer, ...]:
    return tuple(
        OverflowLayer(name, (OverflowTensor(name, name, 0, align(nbytes)),), (), times.get(name, 1))
        for name, nbytes in sizes.items()
    )


def test_overflow_of_keeps_shared_then_frequent_then_large():
    sizes = {"small": 10240, "tiny": 10240, "often": 51200, "large": 102400, "common": 51200}
    layers = {"big": chain(sizes, often=3)}
    queries = {"big": QueryCost(tuple(sizes), 0.01, 0, 1.0), "other": QueryCost(("common",), 0.01, 0, 1.0)}
    costs = Costs(queries, sizes, RATE)

    def keep_of(budget: int) -> set[str]:
        return set(overflow_of(costs, budget, layers.__getitem__).costs.queries["big"].tensors)

    scratch = 102400
    assert keep_of(scratch) == set()
    assert keep_of(scratch + 51200) == {"common"}
    assert keep_of(scratch + 102400) == {"common", "often"}
    # With the largest resident the scratch becomes smaller: it costs less than its bytes.
    assert keep_of(51200 + 51200 + 102400 + 10240) == {"common", "often", "large"}


def test_scratch_bytes_outer_layer_is_added():
    inner = [
        OverflowLayer(f"around.{name}", (OverflowTensor(name, name, 0, size),), (0,))
        for name, size in (("x", 640), ("y", 1280))
    ]
    layers = (OverflowLayer("around", (OverflowTensor("own", "own", 0, 64),)), *inner)
    assert scratch_bytes(layers, {"own", "x", "y"}) == 64 + 1280
    assert scratch_bytes(layers, {"own", "x"}) == 64 + 640
    assert scratch_bytes(layers, {"own"}) == 64 and scratch_bytes(layers) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_overflow_costs_run_under_every_policy(policy):
    sizes = {f"t{index}": 100_000 for index in range(8)} | {"s": 100_000}
    queries = {
        "big": QueryCost(tuple(f"t{index}" for index in range(8)), 0.01, 0, 2.0),
        "small": QueryCost(("s",), 0.01, 1000, 2.0),
    }
    budget = 4 * footprint_bytes(100_000)
    frames = {query: [index / 2 for index in range(20)] for query in queries}
    costs = Costs(queries, sizes, RATE)
    refused = simulate(costs, frames, budget, POLICIES[policy])
    within = overflow_of(costs, budget, {"big": chain(dict(list(sizes.items())[:8]))}.__getitem__)
    played = simulate(within.costs, frames, budget, POLICIES[policy])
    assert within.run_bytes == {"big": 500_000} and played.max_used_bytes <= budget
    assert [row["processed"] > 0 for row in refused.per_query()] == [False, True]
    assert all(row["processed"] > 0 for row in played.per_query())


def test_pick_evictions_takes_what_is_needed_last():
    sizes = {"a": 512, "b": 1024, "big": 8192, "small": 512, "d": 512}
    queries = {"a": ("a",), "b": ("b",), "c": ("big", "small"), "d": ("d",)}
    costs = Costs({query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()}, sizes, 1e6)
    resident = frozenset({"a", "b", "big", "small"})
    state = SchedulerState(0.0, {}, resident, costs.resident_bytes(resident))
    used = state.resident_bytes

    def evictions(budget: int) -> tuple[str, ...] | None:
        return pick_evictions(state, costs, Plan(tuple("abcd"), {}, budget), "d", ("d",), 1)

    assert evictions(used + 512) == ()
    assert evictions(used) == ("small",), "c had its turn just before d"
    assert evictions(used - 1024) == ("big",)
    assert evictions(256) is None


@given(st.data())
def test_pick_evictions_any_state_is_enough_and_minimal(data):
    costs = data.draw(strategies.costs())
    budget = data.draw(strategies.budgets(costs))
    order = data.draw(st.permutations(list(costs.queries)))
    resident = frozenset(data.draw(st.lists(st.sampled_from(sorted(costs.tensor_bytes)), unique=True)))
    state = SchedulerState(0.0, {}, resident, costs.resident_bytes(resident))
    query = data.draw(st.sampled_from(order))
    cost = costs.queries[query]
    missing = tuple(cost.needed - resident)
    evict = pick_evictions(state, costs, Plan(tuple(order), {}, budget), query, missing, 1)
    if evict is None:
        assert costs.alone_bytes(query) > budget
        return
    after = (resident - set(evict)) | cost.needed
    assert set(evict) <= resident - cost.needed and len(set(evict)) == len(evict)
    assert costs.resident_bytes(after) + cost.workspace_bytes <= budget
    for name in evict:
        assert costs.resident_bytes(after | {name}) + cost.workspace_bytes > budget
