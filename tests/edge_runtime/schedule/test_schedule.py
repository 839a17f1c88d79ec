from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.schedule import Demand, Plan, Situation
from edge_runtime.schedule.batches import batch_in_time, expected_round, largest_batches, worst_first_batches
from edge_runtime.schedule.costs import BatchCost, Costs, QueryCost, apart
from edge_runtime.schedule.order import cycle_loads, least_moving_order, share_order
from edge_runtime.schedule.pieces import pieces_of
from edge_runtime.schedule.room import room_for
from tests.edge_runtime.schedule import strategies

KIB = 1024


def adjacent_bytes(order, costs: Costs) -> int:
    return sum(
        costs.moved_bytes(costs.queries[a].needed & costs.queries[b].needed)
        for a, b in zip(order, (*order[1:], order[0]), strict=True)
    )


@given(strategies.costs())
def test_the_papers_order_is_a_permutation_and_the_best_of_few(costs):
    order = share_order(costs)
    assert sorted(order) == sorted(costs.queries)
    if len(order) <= 4:
        assert adjacent_bytes(order, costs) == max(adjacent_bytes(other, costs) for other in permutations(order))
    assert share_order(costs) == order


def test_queries_that_share_most_become_neighbours():
    queries = {"day-car": ("x", "h1"), "night-person": ("y", "h2"), "night-car": ("x", "h3"), "day-person": ("y", "h4")}
    costs = Costs(
        {query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()},
        {**dict.fromkeys(("x", "y"), 100_000), **dict.fromkeys(("h1", "h2", "h3", "h4"), 10)},
        1e6,
    )
    assert share_order(costs) == ("day-car", "night-car", "night-person", "day-person")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_queries_have_an_order_too(count):
    costs = Costs({f"q{i}": QueryCost(("t",), 0.01, 0, 0.1) for i in range(count)}, {"t": 1}, 1e6)
    assert len(share_order(costs)) == len(least_moving_order(costs, 512)) == count


def played(costs: Costs, order, budget: int, rounds: int = 4) -> int:
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
def test_a_settled_round_moves_what_playing_it_moves(data):
    """Equal sizes: with unequal ones Belady's rule may settle in cycles of several rounds."""
    costs = data.draw(strategies.costs())
    costs = Costs(costs.queries, dict.fromkeys(costs.tensor_bytes, 4096), 1e6)
    budget = max(map(costs.alone_bytes, costs.queries)) + data.draw(st.integers(0, 8)) * 4096
    order = share_order(costs)
    loads = cycle_loads(costs, order, budget)
    everything = costs.resident_bytes(costs.tensor_bytes.keys())
    if everything + max(cost.workspace_bytes for cost in costs.queries.values()) <= budget:
        assert not any(loads.values()) and played(costs, order, budget) == 0
    assert all(0 <= nbytes <= costs.moved_bytes(costs.queries[query].needed) for query, nbytes in loads.items())
    searched = least_moving_order(costs, budget)
    assert sorted(searched) == sorted(order)
    assert sum(cycle_loads(costs, searched, budget).values()) <= sum(loads.values())


def test_an_order_that_moves_less_than_the_papers_is_found():
    queries = {"a": ("x", "y"), "b": ("x", "z"), "c": ("y", "w"), "d": ("z", "w")}
    costs = Costs(
        {query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()}, dict.fromkeys("xyzw", 512), 1e6
    )
    assert played(costs, ("a", "b", "d", "c"), 3 * 512) <= played(costs, ("a", "d", "b", "c"), 3 * 512)
    best = min(sum(cycle_loads(costs, order, 1024).values()) for order in permutations(queries))
    assert sum(cycle_loads(costs, least_moving_order(costs, 1024), 1024).values()) == best


BATCHES = (BatchCost(2, 0.030, 2000), BatchCost(4, 0.050, 4000))


def test_a_batch_holds_the_frames_that_are_all_in_time_when_it_ends():
    cost = QueryCost(("t",), 0.020, 1000, 0.1, BATCHES)
    assert batch_in_time((0.0, 0.01), 0.05, cost, 4).count == 2
    assert batch_in_time((0.0, 0.01), 0.08, cost, 4) == batch_in_time((0.0, 0.01), 0.08, cost, 1)
    found = batch_in_time((0.0, 0.04, 0.05), 0.075, cost, 4)
    assert (found.count, found.late) == (2, 1), "the oldest is given up for two that are in time together"
    assert batch_in_time((0.0,), 0.09, cost, 4) == type(found)(0, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(sorted), st.floats(0, 1.2), st.integers(1, 4))
def test_no_larger_batch_would_be_in_time(waiting, start, most):
    cost = QueryCost(("t",), 0.020, 1000, 0.1, BATCHES)
    found = batch_in_time(waiting, start, cost, most)
    taken = waiting[found.late : found.late + found.count]
    assert len(taken) == found.count <= most
    if taken:
        assert start + cost.run_of(found.count) <= taken[0] + cost.sla_s + 1e-6
    for count in range(found.count + 1, min(most, len(waiting)) + 1):
        assert start + cost.run_of(count) > waiting[-count] + cost.sla_s - 1e-6


def test_a_batch_is_as_large_as_the_budget_leaves_room_for():
    costs = Costs({"q": QueryCost(("t",), 0.02, 1000, 0.1, BATCHES)}, {"t": 512}, 1e6)
    assert [largest_batches(costs, 512 + room)["q"] for room in (1000, 2000, 3999, 4000)] == [1, 2, 2, 4]


def brute_force(costs: Costs, demands, order, budget: int) -> float:
    def worst(sizes) -> float:
        batches = dict(zip(order, sizes, strict=True))
        expected = expected_round(costs, demands, cycle_loads(costs, order, budget, batches), batches)
        return min(expected.per_second(query) / demands[query].fps for query in order)

    largest = largest_batches(costs, budget)
    return max(
        worst(sizes) for sizes in product(*([one for one in (1, 2, 4, 8) if one <= largest[query]] for query in order))
    )


@settings(max_examples=30)
@given(st.data())
def test_the_batches_chosen_are_as_good_for_the_worst_query_as_any_combination(data):
    queries, demands = {}, {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        run_s = data.draw(st.integers(5, 60)) / 1000
        saving = data.draw(st.sampled_from([0.3, 0.6, 1.0]))
        larger = tuple(BatchCost(count, run_s * (1 + saving * (count - 1)), 0) for count in (2, 4, 8))
        queries[name] = QueryCost((name, "all"), run_s, 0, data.draw(st.sampled_from([0.1, 0.4])), larger)
        demands[name] = Demand(data.draw(st.sampled_from([5.0, 15.0, 30.0])))
    costs = Costs(queries, {"a": 2048, "b": 4096, "c": 1024, "all": 2048}, 1e5)
    budget, order = data.draw(st.sampled_from([6144, 7168, 16384])), tuple(queries)
    chosen = worst_first_batches(costs, demands, order, budget)
    expected = expected_round(costs, demands, cycle_loads(costs, order, budget, chosen), chosen)
    reached = min(expected.per_second(query) / demands[query].fps for query in order)
    assert reached == pytest.approx(brute_force(costs, demands, order, budget), rel=1e-6, abs=1e-9)


def test_room_is_made_by_what_is_needed_last_and_by_no_more_than_must_go():
    sizes = {"a": 512, "b": 1024, "big": 8192, "small": 512, "d": 512}
    queries = {"a": ("a",), "b": ("b",), "c": ("big", "small"), "d": ("d",)}
    costs = Costs({query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()}, sizes, 1e6)
    resident = frozenset({"a", "b", "big", "small"})
    situation = Situation(0.0, {}, resident, costs.resident_bytes(resident))
    used = situation.resident_bytes

    def evicted(budget: int) -> tuple[str, ...] | None:
        return room_for(situation, costs, Plan(tuple("abcd"), {}, budget), "d", ("d",), 1)

    assert evicted(used + 512) == ()
    assert evicted(used) == ("small",), "c had its turn just before d"
    assert evicted(used - 1024) == ("big",)
    assert evicted(256) is None


@given(st.data())
def test_room_suffices_spares_what_is_needed_and_evicts_nothing_in_vain(data):
    costs = data.draw(strategies.costs())
    budget = data.draw(strategies.budgets(costs))
    order = data.draw(st.permutations(list(costs.queries)))
    resident = frozenset(data.draw(st.lists(st.sampled_from(sorted(costs.tensor_bytes)), unique=True)))
    situation = Situation(0.0, {}, resident, costs.resident_bytes(resident))
    query = data.draw(st.sampled_from(order))
    cost = costs.queries[query]
    missing = tuple(cost.needed - resident)
    evict = room_for(situation, costs, Plan(tuple(order), {}, budget), query, missing, 1)
    if evict is None:
        assert costs.alone_bytes(query) > budget
        return
    after = (resident - set(evict)) | cost.needed
    assert set(evict) <= resident - cost.needed and len(set(evict)) == len(evict)
    assert costs.resident_bytes(after) + cost.workspace_bytes <= budget
    for name in evict:
        assert costs.resident_bytes(after | {name}) + cost.workspace_bytes > budget


@given(strategies.costs(), st.integers(1, 60_000))
def test_condensed_costs_are_the_same_costs_over_fewer_names(costs, piece_bytes):
    small = pieces_of(costs, piece_bytes).costs
    assert set(small.queries) == set(costs.queries) and len(small.tensor_bytes) <= len(costs.tensor_bytes)
    for a, b in product(costs.queries, repeat=2):
        before, after = (one.queries[a].needed & one.queries[b].needed for one in (costs, small))
        assert small.moved_bytes(after) == costs.moved_bytes(before)
        assert small.resident_bytes(after) == costs.resident_bytes(before)


@given(strategies.costs())
def test_costs_apart_share_nothing_and_weigh_the_same_alone(costs):
    alone = apart(costs)
    for query, cost in costs.queries.items():
        assert alone.weights_bytes(query) == costs.weights_bytes(query)
        assert alone.moved_bytes(alone.queries[query].tensors) == costs.moved_bytes(cost.tensors)
        assert not any(
            alone.queries[query].needed & alone.queries[other].needed for other in costs.queries if other != query
        )


@given(st.data())
def test_a_piece_is_held_when_all_its_tensors_are_and_pieces_hold_every_tensor_once(data):
    costs = data.draw(strategies.costs())
    pieces = pieces_of(costs, data.draw(st.integers(1, 60_000)))
    needed = {name for cost in costs.queries.values() for name in cost.needed}
    assert sorted(pieces.names(pieces.costs.tensor_bytes)) == sorted(needed)
    query = data.draw(st.sampled_from(list(costs.queries)))
    mine = pieces.costs.queries[query].needed
    assert set(pieces.names(mine)) == costs.queries[query].needed
    assert pieces.held(costs.queries[query].needed) >= mine
    for name in costs.queries[query].needed:
        assert not pieces.held(costs.queries[query].needed - {name}) >= mine
