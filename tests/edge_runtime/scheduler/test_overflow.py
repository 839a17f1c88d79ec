"""Which tensors of a query too large for the budget stay, and what the rest costs: plain numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.memory.allocator import footprint_bytes
from edge_runtime.policies import POLICIES
from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from edge_runtime.scheduler.eviction import (
    MIN_OVERFLOW_BYTES,
    OverflowLayer,
    OverflowTensor,
    overflow_of,
    scratch_bytes,
)
from edge_runtime.simulation.simulator import simulate

RATE = 1e6


def aligned(nbytes: int) -> int:
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
                4 * aligned(sizes[name]) if name in widened else 0,
                (4 if name in widened else 1) * aligned(sizes[name]),
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
def test_what_overflows_fits_the_budget_and_what_fits_or_cannot_stays_as_it_was(box):
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


@given(boxes())
def test_a_run_takes_the_overflow_bytes_longer_and_the_scratch_more(box):
    costs, layers, budget = box
    found = overflow_of(costs, budget, layers.__getitem__)
    for query, overflow in found.tensors.items():
        before, after, own = costs.queries[query], found.costs.queries[query], layers[query]
        nbytes = sum(
            layer.times * costs.tensor_bytes[part.tensor]
            for layer in own
            for part in layer.parts
            if part.tensor in overflow
        )
        assert found.run_bytes[query] == nbytes
        more = scratch_bytes(own, overflow) - scratch_bytes(own)
        for count in (1, 2):
            assert after.run_of(count) == pytest.approx(before.run_of(count) + nbytes / RATE)
            assert after.workspace_of(count) == before.workspace_of(count) + more


@given(boxes())
def test_no_tensor_overflows_that_could_stay_beside_the_others_and_a_refusal_says_what_suffices(box):
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


def test_queries_that_fit_not_even_alone_are_named():
    costs = Costs({"a": QueryCost(("t",), 0.0, 100, 1.0), "b": QueryCost(("t",), 0.0, 0, 1.0)}, {"t": 512}, 1.0)
    found = [overflow_of(costs, budget, lambda _: chain({"t": 512})).lacking for budget in (612, 611, 511)]
    assert found == [{}, {"a": 612}, {"a": 612, "b": 512}]


def chain(sizes: dict[str, int], **times: int) -> tuple[OverflowLayer, ...]:
    return tuple(
        OverflowLayer(name, (OverflowTensor(name, name, 0, aligned(nbytes)),), (), times.get(name, 1))
        for name, nbytes in sizes.items()
    )


def test_what_others_need_stays_first_then_what_is_copied_most_often_then_what_is_largest():
    sizes = {"small": 10240, "tiny": 10240, "often": 51200, "large": 102400, "common": 51200}
    layers = {"big": chain(sizes, often=3)}
    queries = {"big": QueryCost(tuple(sizes), 0.01, 0, 1.0), "other": QueryCost(("common",), 0.01, 0, 1.0)}
    costs = Costs(queries, sizes, RATE)

    def kept(budget: int) -> set[str]:
        return set(overflow_of(costs, budget, layers.__getitem__).costs.queries["big"].tensors)

    scratch = 102400
    assert kept(scratch) == set()
    assert kept(scratch + 51200) == {"common"}
    assert kept(scratch + 102400) == {"common", "often"}
    # With the largest resident the scratch becomes smaller: it costs less than its bytes.
    assert kept(51200 + 51200 + 102400 + 10240) == {"common", "often", "large"}


def test_a_layer_around_others_keeps_its_scratch_while_they_have_theirs():
    inner = [
        OverflowLayer(f"around.{name}", (OverflowTensor(name, name, 0, size),), (0,))
        for name, size in (("x", 640), ("y", 1280))
    ]
    layers = (OverflowLayer("around", (OverflowTensor("own", "own", 0, 64),)), *inner)
    assert scratch_bytes(layers, {"own", "x", "y"}) == 64 + 1280
    assert scratch_bytes(layers, {"own", "x"}) == 64 + 640
    assert scratch_bytes(layers, {"own"}) == 64 and scratch_bytes(layers) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_schedule_takes_such_costs_as_any_others(policy):
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
