"""Room is made by what is needed last, and by no more than must go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.scheduler import Plan, SchedulerState
from edge_runtime.scheduler.costs import Costs, QueryCost
from edge_runtime.scheduler.eviction import pick_evictions
from tests.edge_runtime.scheduler import strategies


def test_room_is_made_by_what_is_needed_last_and_by_no_more_than_must_go():
    sizes = {"a": 512, "b": 1024, "big": 8192, "small": 512, "d": 512}
    queries = {"a": ("a",), "b": ("b",), "c": ("big", "small"), "d": ("d",)}
    costs = Costs({query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()}, sizes, 1e6)
    resident = frozenset({"a", "b", "big", "small"})
    state = SchedulerState(0.0, {}, resident, costs.resident_bytes(resident))
    used = state.resident_bytes

    def evicted(budget: int) -> tuple[str, ...] | None:
        return pick_evictions(state, costs, Plan(tuple("abcd"), {}, budget), "d", ("d",), 1)

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
