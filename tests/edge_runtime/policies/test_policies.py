"""What all policies keep to, and the turns of `gemel` and `time-sharing`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.policies import DEFAULT_POLICY, POLICIES, policy_named
from gemel.edge_runtime.policies.gemel import GemelPolicy, TurnHistory
from gemel.edge_runtime.scheduler import Plan, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import simulate
from gemel.models.errors import InputError
from gemel.testing import check_decision
from tests.edge_runtime.scheduler import strategies

KIB = 1024


def three_alike(run_s: float = 0.01, sla_s: float = 0.1) -> Costs:
    """a, b and c each have one private tensor of 4 KiB and share one of 4 KiB; a load of 4 KiB takes 4.096 ms."""
    queries = {query: QueryCost(("shared", query), run_s, 0, sla_s) for query in "abc"}
    return Costs(queries, {"shared": 4 * KIB, "a": 4 * KIB, "b": 4 * KIB, "c": 4 * KIB}, 1e6)


def state_of(
    costs: Costs, now: float, waiting, resident: Iterable[str] = (), policy_state=None, urgency=None
) -> SchedulerState:
    held = frozenset(resident)
    return SchedulerState(now, waiting, held, costs.resident_bytes(held), policy_state, urgency or {})


def decide_gemel(costs: Costs, budget: int, now: float, waiting, resident: Iterable[str] = (), turns=None, order="abc"):
    """What `gemel` decides, with batches of one."""
    plan = Plan(tuple(order), dict.fromkeys(order, 1), budget)
    return GemelPolicy().decide(state_of(costs, now, waiting, resident, turns), costs, plan)


def test_policy_named_unknown_lists_the_names():
    assert DEFAULT_POLICY in POLICIES
    names = ", ".join(POLICIES)
    with pytest.raises(InputError, match=f"^--policy: there is no policy 'first'; choose one of: {names}"):
        policy_named("first")


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(st.data())
def test_decide_any_state_keeps_budget_and_deadlines(name, data):
    policy = POLICIES[name]
    costs = policy.view(data.draw(strategies.costs()))
    budget = data.draw(strategies.budgets(costs))
    specs = {query: QuerySpec(data.draw(st.sampled_from([1.0, 10.0, 30.0]))) for query in costs.queries}
    plan = policy.plan(costs, specs, budget)
    resident = frozenset(data.draw(st.lists(st.sampled_from(sorted(costs.tensor_bytes)), unique=True)))
    policy_state = None
    for step in range(data.draw(st.integers(1, 4))):
        now = 1.0 + step / 20
        captured = st.lists(
            st.sampled_from([now - 0.1, now - 0.05, now - 0.01, now]), min_size=1, max_size=4, unique=True
        ).map(lambda times: tuple(sorted(times)))
        waiting = data.draw(st.dictionaries(st.sampled_from(list(costs.queries)), captured))
        urgency = data.draw(st.dictionaries(st.sampled_from(list(costs.queries)), st.floats(0.25, 4)))
        state = state_of(costs, now, waiting, resident, policy_state, urgency)
        decision = check_decision(policy, state, costs, plan)
        resident = (resident - set(decision.evict)) | set(decision.load)
        policy_state = decision.policy_state


def test_gemel_all_resident_takes_turns_in_order():
    costs, everything = three_alike(), {"shared", "a", "b", "c"}
    turns, seen = TurnHistory(), []
    for _ in range(5):
        decision = decide_gemel(costs, 64 * KIB, 0.0, dict.fromkeys("abc", (0.0,)), everything, turns)
        assert decision.count and not decision.load and not decision.evict
        turns = decision.policy_state
        seen.append(decision.query)
    assert "".join(seen) == "abcab"


def test_gemel_loads_missing_and_evicts_most_recently_run():
    decision = decide_gemel(three_alike(), 12 * KIB, 0.0, {"c": (0.0,)}, {"shared", "a", "b"}, TurnHistory(("b", "a")))
    assert (decision.query, decision.load, decision.evict) == ("c", ("c",), ("b",))


def test_gemel_counts_workspace_when_weights_are_resident():
    costs = Costs(
        {"a": QueryCost(("a",), 0.01, 4 * KIB, 0.1), "b": QueryCost(("b",), 0.01, 0, 0.1)},
        {"a": 4 * KIB, "b": 4 * KIB},
        1e6,
    )
    decision = decide_gemel(costs, 8 * KIB, 0.0, {"a": (0.0,)}, {"a", "b"}, TurnHistory(("b",)), "ab")
    assert (decision.query, decision.load, decision.evict) == ("a", (), ("b",))


def test_gemel_load_counts_towards_the_deadline():
    waiting = {"a": (0.0,)}
    there = decide_gemel(three_alike(), 64 * KIB, 0.085, waiting, {"shared", "a"})
    absent = decide_gemel(three_alike(), 64 * KIB, 0.085, waiting)
    assert there.count and absent.query is None and absent.drop == (("a", 0.0, "deadline"),)


def test_gemel_query_passed_over_twice_is_loaded_ahead():
    costs, turns = three_alike(sla_s=0.012), TurnHistory()
    for _ in range(GemelPolicy().patience):
        decision = decide_gemel(costs, 64 * KIB, 0.0, {"a": (0.0,)}, turns=turns)
        assert decision.query is None and decision.drop == (("a", 0.0, "deadline"),)
        turns = decision.policy_state
    ahead = decide_gemel(costs, 64 * KIB, 0.0, {"a": (0.0,)}, turns=turns)
    assert (ahead.query, ahead.count, ahead.load) == ("a", 0, ("shared", "a"))
    turns = ahead.policy_state
    assert turns == TurnHistory(("a",), "a", {})
    then = decide_gemel(costs, 64 * KIB, 0.009, {"a": (0.008,), "b": (0.008,)}, {"shared", "a"}, turns)
    assert (then.query, then.count, then.drop) == ("a", 1, ())


def test_policies_query_slower_than_sla_is_never_loaded():
    for policy in POLICIES.values():
        costs = policy.view(three_alike(run_s=0.2))
        result = simulate(costs, {"a": [i / 10 for i in range(50)]}, 64 * KIB, policy)
        assert result.bytes_moved == 0 and result.per_query()[0]["dropped"] == 50


def test_policies_query_larger_than_budget_drops_for_memory():
    costs = Costs(
        {"big": QueryCost(("big",), 0.01, 0, 0.1), "small": QueryCost(("small",), 0.01, 0, 0.1)},
        {"big": 9 * KIB, "small": KIB},
        1e6,
    )
    for policy in POLICIES.values():
        result = simulate(costs, {"big": [0.0, 0.5], "small": [0.0, 0.5]}, 8 * KIB, policy)
        big, small = result.ledger.to_json()
        assert big["dropped"] == {"memory": 2} and small["processed"] == 2


def test_time_sharing_moves_whole_models():
    costs = three_alike()
    arrivals = {query: [i / 4 for i in range(8)] for query in "abc"}
    shared, whole = (simulate(costs, arrivals, 8 * KIB, POLICIES[name]) for name in ("gemel", "time-sharing"))
    assert whole.bytes_moved == 24 * 8 * KIB and shared.bytes_moved == 24 * 4 * KIB + 4 * KIB
    assert simulate(costs, arrivals, 24 * KIB, POLICIES["time-sharing"]).bytes_moved == 24 * KIB
