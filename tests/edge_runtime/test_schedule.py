from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.costs import Costs, QueryCost
from edge_runtime.schedule import PATIENCE, Decision, Situation, Turns, decide, share_order
from tests.edge_runtime import strategies

KIB = 1024


def three_alike(run_s: float = 0.01, sla_s: float = 0.1) -> Costs:
    """a, b and c each have one private tensor of 4 KiB and share one of 4 KiB; a load of 4 KiB takes 4.096 ms."""
    queries = {query: QueryCost(("shared", query), run_s, 0, sla_s) for query in "abc"}
    return Costs(queries, {"shared": 4 * KIB, "a": 4 * KIB, "b": 4 * KIB, "c": 4 * KIB}, 1e6)


def test_queries_take_turns_round_the_cycle():
    costs, everything = three_alike(), {"shared", "a", "b", "c"}
    turns, seen = Turns(), []
    for _ in range(5):
        decision = decide(Situation(0.0, dict.fromkeys("abc", 0.0), everything, turns), costs, 64 * KIB, "abc")
        assert decision.run and not decision.load and not decision.evict
        turns = turns.after(decision)
        seen.append(decision.turn)
    assert "".join(seen) == "abcab"


def test_a_query_without_a_frame_is_passed_over():
    decision = decide(Situation(0.0, {"c": 0.0}, set(), Turns(("a",))), three_alike(), 64 * KIB, "abc")
    assert decision.turn == "c"


def test_only_what_is_missing_is_loaded_and_the_most_recently_run_makes_room():
    situation = Situation(0.0, {"c": 0.0}, {"shared", "a", "b"}, Turns(("b", "a")))
    decision = decide(situation, three_alike(), 12 * KIB, "abc")
    assert (decision.turn, decision.load, decision.evict) == ("c", ("c",), ("b",))


def test_workspace_counts_even_when_all_weights_are_resident():
    costs = Costs({"a": QueryCost(("a",), 0.01, 4 * KIB, 0.1), "b": QueryCost(("b",), 0.01, 0, 0.1)},
                  {"a": 4 * KIB, "b": 4 * KIB}, 1e6)
    decision = decide(Situation(0.0, {"a": 0.0}, {"a", "b"}, Turns(("b",))), costs, 8 * KIB, "ab")
    assert (decision.turn, decision.load, decision.evict) == ("a", (), ("b",))


def test_a_frame_that_would_miss_its_deadline_is_dropped_and_the_next_query_runs():
    situation = Situation(1.0, {"a": 0.905, "b": 0.95}, {"shared", "a", "b"})
    decision = decide(situation, three_alike(), 64 * KIB, "abc")
    assert (decision.drop, decision.turn, decision.run) == ((("a", "deadline"),), "b", True)


def test_the_load_counts_towards_the_deadline():
    pending = {"a": 0.0}
    resident = decide(Situation(0.085, pending, {"shared", "a"}), three_alike(), 64 * KIB, "abc")
    absent = decide(Situation(0.085, pending, set()), three_alike(), 64 * KIB, "abc")
    assert resident.run and absent.turn is None and absent.drop == (("a", "deadline"),)


def test_a_query_passed_over_for_want_of_its_tensors_is_loaded_ahead_and_runs_its_next_frame():
    costs, turns = three_alike(sla_s=0.012), Turns()
    for _ in range(PATIENCE):
        decision = decide(Situation(0.0, {"a": 0.0}, set(), turns), costs, 64 * KIB, "abc")
        assert decision == Decision(drop=(("a", "deadline"),))
        turns = turns.after(decision)
    ahead = decide(Situation(0.0, {"a": 0.0}, set(), turns), costs, 64 * KIB, "abc")
    assert (ahead.turn, ahead.run, ahead.load, ahead.drop) == ("a", False, ("shared", "a"), (("a", "deadline"),))
    turns = turns.after(ahead)
    assert turns == Turns(("a",), "a", {})
    resident = {"shared", "a"}
    then = decide(Situation(0.009, {"a": 0.008, "b": 0.008}, resident, turns), costs, 64 * KIB, "abc")
    assert (then.turn, then.run, then.drop) == ("a", True, ())
    none_came = decide(Situation(0.009, {"b": 0.008}, resident, turns), three_alike(), 64 * KIB, "abc")
    assert none_came.turn == "b", "the turn passes when no frame came during the load"


def test_a_query_slower_to_run_than_its_deadline_is_never_loaded():
    turns = Turns(passed={"a": PATIENCE})
    decision = decide(Situation(0.0, {"a": 0.0}, set(), turns), three_alike(run_s=0.2), 64 * KIB, "abc")
    assert decision == Decision(drop=(("a", "deadline"),))


def test_a_query_that_does_not_fit_alone_is_dropped_for_memory_and_the_others_run():
    costs = Costs({"big": QueryCost(("big",), 0.01, 0, 0.1), "small": QueryCost(("small",), 0.01, 0, 0.1)},
                  {"big": 9 * KIB, "small": KIB}, 1e6)
    decision = decide(Situation(0.0, {"big": 0.0, "small": 0.0}, set()), costs, 8 * KIB, ("big", "small"))
    assert (decision.drop, decision.turn) == ((("big", "memory"),), "small")


@given(st.data())
def test_any_decision_keeps_the_budget_and_evicts_nothing_the_turn_needs(data):
    costs = data.draw(strategies.costs())
    budget = data.draw(strategies.budgets(costs))
    order = tuple(data.draw(st.permutations(list(costs.queries))))
    resident = frozenset(data.draw(st.lists(st.sampled_from(sorted(costs.tensor_bytes)), unique=True)))
    recent = tuple(data.draw(st.lists(st.sampled_from(order), unique=True)))
    loaded = recent[0] if recent and data.draw(st.booleans()) else None
    pending = data.draw(st.dictionaries(st.sampled_from(order), st.sampled_from([0.9, 0.95, 0.99, 1.0])))
    passed = data.draw(st.dictionaries(st.sampled_from(order), st.integers(0, PATIENCE)))
    situation = Situation(1.0, pending, resident, Turns(recent, loaded, passed))
    decision = decide(situation, costs, budget, order)
    dropped = [query for query, _ in decision.drop]
    assert set(dropped) <= set(pending) and len(set(dropped)) == len(dropped)
    if decision.turn is None:
        assert set(dropped) == set(pending) and not decision.load and not decision.evict
        return
    cost = costs.queries[decision.turn]
    after = (resident - set(decision.evict)) | set(decision.load)
    assert cost.needed <= after
    assert set(decision.load) == cost.needed - resident and len(set(decision.load)) == len(decision.load)
    assert set(decision.evict) <= resident - cost.needed
    assert costs.resident_bytes(after) + cost.workspace_bytes <= budget
    if decision.evict:
        without_last = after | {decision.evict[-1]}
        assert costs.resident_bytes(without_last) + cost.workspace_bytes > budget, "nothing is evicted without need"
    if decision.run:
        predicted = 1.0 + costs.load_s(costs.moved_bytes(decision.load)) + cost.run_s
        assert predicted <= pending[decision.turn] + cost.sla_s + 1e-9
        assert decision.turn not in dropped
    assert decide(situation, costs, budget, order) == decision


def adjacent_bytes(order, costs: Costs) -> int:
    return sum(costs.moved_bytes(costs.queries[a].needed & costs.queries[b].needed)
               for a, b in zip(order, (*order[1:], order[0]), strict=True))


@given(strategies.costs())
def test_the_order_is_a_permutation_and_no_exchange_of_two_arcs_improves_it(costs):
    order = share_order(costs)
    assert sorted(order) == sorted(costs.queries)
    if len(order) <= 4:
        best = max(adjacent_bytes(other, costs) for other in permutations(order))
        assert adjacent_bytes(order, costs) == best
    assert share_order(costs) == order


def test_queries_that_share_most_become_neighbours():
    queries = {"day-car": ("x", "h1"), "night-person": ("y", "h2"), "night-car": ("x", "h3"), "day-person": ("y", "h4")}
    costs = Costs({query: QueryCost(tensors, 0.01, 0, 0.1) for query, tensors in queries.items()},
                  {**dict.fromkeys(("x", "y"), 100_000), **dict.fromkeys(("h1", "h2", "h3", "h4"), 10)}, 1e6)
    assert share_order(costs) == ("day-car", "night-car", "night-person", "day-person")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_queries_have_an_order_too(count):
    costs = Costs({f"q{i}": QueryCost(("t",), 0.01, 0, 0.1) for i in range(count)}, {"t": 1}, 1e6)
    assert len(share_order(costs)) == count
