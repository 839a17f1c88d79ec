"""What all policies keep to, and what each of them does of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.policies import DEFAULT_POLICY, POLICIES, policy_named
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.free import freely
from edge_runtime.policies.gemel import PATIENCE, GemelPolicy, TurnHistory
from edge_runtime.policies.jobs import Job, in_time_together
from edge_runtime.scheduler import Plan, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from edge_runtime.simulation.simulator import simulate
from models.errors import InputError
from tests.edge_runtime.scheduler import strategies

KIB = 1024


def three_alike(run_s: float = 0.01, sla_s: float = 0.1) -> Costs:
    """a, b and c each have one private tensor of 4 KiB and share one of 4 KiB; a load of 4 KiB takes 4.096 ms."""
    queries = {query: QueryCost(("shared", query), run_s, 0, sla_s) for query in "abc"}
    return Costs(queries, {"shared": 4 * KIB, "a": 4 * KIB, "b": 4 * KIB, "c": 4 * KIB}, 1e6)


def situation_of(
    costs: Costs, now: float, waiting, resident: Iterable[str] = (), policy_state=None, urgency=None
) -> SchedulerState:
    held = frozenset(resident)
    return SchedulerState(now, waiting, held, costs.resident_bytes(held), policy_state, urgency or {})


def chosen_freely(costs: Costs, plan: Plan, state: SchedulerState):
    """What `adaptive` decides where a trial allows it to."""
    book = Book(Shadow(VirtualBox(state.now)))
    return freely(state, costs, plan, book.seen(state, costs, plan.detail.reference))


def decided(costs: Costs, budget: int, now: float, waiting, resident: Iterable[str] = (), turns=None, order="abc"):
    """What the paper's policy decides, with batches of one."""
    plan = Plan(tuple(order), dict.fromkeys(order, 1), budget)
    return GemelPolicy().decide(situation_of(costs, now, waiting, resident, turns), costs, plan)


def test_a_policy_goes_by_its_name_and_ours_is_the_default():
    assert set(POLICIES) == {"adaptive", "gemel", "time-sharing"} and DEFAULT_POLICY == "adaptive"
    with pytest.raises(InputError, match=r"^--policy: there is no policy 'first'; choose one of: adaptive, gemel"):
        policy_named("first")


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(st.data())
def test_any_decision_keeps_the_budget_and_evicts_nothing_the_turn_needs(name, data):
    policy = POLICIES[name]
    costs = policy.view(data.draw(strategies.costs()))
    budget = data.draw(strategies.budgets(costs))
    demands = {query: QuerySpec(data.draw(st.sampled_from([1.0, 10.0, 30.0]))) for query in costs.queries}
    plan = policy.plan(costs, demands, budget)
    resident = frozenset(data.draw(st.lists(st.sampled_from(sorted(costs.tensor_bytes)), unique=True)))
    policy_state = None
    for step in range(data.draw(st.integers(1, 4))):
        now = 1.0 + step / 20
        captured = st.lists(
            st.sampled_from([now - 0.1, now - 0.05, now - 0.01, now]), min_size=1, max_size=4, unique=True
        ).map(lambda times: tuple(sorted(times)))
        waiting = data.draw(st.dictionaries(st.sampled_from(list(costs.queries)), captured))
        urgency = data.draw(st.dictionaries(st.sampled_from(list(costs.queries)), st.floats(0.25, 4)))
        state = situation_of(costs, now, waiting, resident, policy_state, urgency)
        decision = policy.decide(state, costs, plan)
        dropped = [(query, captured_at) for query, captured_at, _ in decision.drop]
        assert len(set(dropped)) == len(dropped) and all(at in waiting[query] for query, at in dropped)
        if decision.query is not None:
            cost = costs.queries[decision.query]
            after = (resident - set(decision.evict)) | set(decision.load)
            assert cost.needed <= after
            assert set(decision.load) == cost.needed - resident
            assert len(set(decision.load)) == len(decision.load)
            assert set(decision.evict) <= resident - cost.needed
            assert costs.resident_bytes(after) + cost.workspace_of(max(1, decision.count)) <= budget
            left = [at for at in waiting.get(decision.query, ()) if (decision.query, at) not in dropped]
            finished = now + costs.load_s(costs.moved_bytes(decision.load))
            if decision.count:
                finished += cost.run_of(decision.count)
                assert all(finished <= at + cost.sla_s + 1e-9 for at in left[: decision.count])
                assert len(left) >= decision.count
            resident = after
        else:
            assert not decision.load and not decision.evict and not decision.count
        again = policy.decide(state, costs, plan)
        assert (again.query, again.count, again.evict, again.load, again.drop) == (
            decision.query,
            decision.count,
            decision.evict,
            decision.load,
            decision.drop,
        )
        policy_state = decision.policy_state


def test_the_papers_queries_take_turns_round_the_cycle():
    costs, everything = three_alike(), {"shared", "a", "b", "c"}
    turns, seen = TurnHistory(), []
    for _ in range(5):
        decision = decided(costs, 64 * KIB, 0.0, dict.fromkeys("abc", (0.0,)), everything, turns)
        assert decision.count and not decision.load and not decision.evict
        turns = decision.policy_state
        seen.append(decision.query)
    assert "".join(seen) == "abcab"


def test_only_what_is_missing_is_loaded_and_the_most_recently_run_makes_room():
    decision = decided(three_alike(), 12 * KIB, 0.0, {"c": (0.0,)}, {"shared", "a", "b"}, TurnHistory(("b", "a")))
    assert (decision.query, decision.load, decision.evict) == ("c", ("c",), ("b",))


def test_workspace_counts_even_when_all_weights_are_resident():
    costs = Costs(
        {"a": QueryCost(("a",), 0.01, 4 * KIB, 0.1), "b": QueryCost(("b",), 0.01, 0, 0.1)},
        {"a": 4 * KIB, "b": 4 * KIB},
        1e6,
    )
    decision = decided(costs, 8 * KIB, 0.0, {"a": (0.0,)}, {"a", "b"}, TurnHistory(("b",)), "ab")
    assert (decision.query, decision.load, decision.evict) == ("a", (), ("b",))


def test_the_load_counts_towards_the_deadline():
    waiting = {"a": (0.0,)}
    there = decided(three_alike(), 64 * KIB, 0.085, waiting, {"shared", "a"})
    absent = decided(three_alike(), 64 * KIB, 0.085, waiting)
    assert there.count and absent.query is None and absent.drop == (("a", 0.0, "deadline"),)


def test_a_query_passed_over_for_want_of_its_tensors_is_loaded_ahead_and_runs_its_next_frame():
    costs, turns = three_alike(sla_s=0.012), TurnHistory()
    for _ in range(PATIENCE):
        decision = decided(costs, 64 * KIB, 0.0, {"a": (0.0,)}, turns=turns)
        assert decision.query is None and decision.drop == (("a", 0.0, "deadline"),)
        turns = decision.policy_state
    ahead = decided(costs, 64 * KIB, 0.0, {"a": (0.0,)}, turns=turns)
    assert (ahead.query, ahead.count, ahead.load) == ("a", 0, ("shared", "a"))
    turns = ahead.policy_state
    assert turns == TurnHistory(("a",), "a", {})
    then = decided(costs, 64 * KIB, 0.009, {"a": (0.008,), "b": (0.008,)}, {"shared", "a"}, turns)
    assert (then.query, then.count, then.drop) == ("a", 1, ())


def test_a_query_slower_to_run_than_its_deadline_is_never_loaded():
    for policy in POLICIES.values():
        costs = policy.view(three_alike(run_s=0.2))
        result = simulate(costs, {"a": [i / 10 for i in range(50)]}, 64 * KIB, policy)
        assert result.bytes_moved == 0 and result.per_query()[0]["dropped"] == 50


def test_a_query_that_does_not_fit_alone_is_dropped_for_memory_and_the_others_run():
    costs = Costs(
        {"big": QueryCost(("big",), 0.01, 0, 0.1), "small": QueryCost(("small",), 0.01, 0, 0.1)},
        {"big": 9 * KIB, "small": KIB},
        1e6,
    )
    for policy in POLICIES.values():
        result = simulate(costs, {"big": [0.0, 0.5], "small": [0.0, 0.5]}, 8 * KIB, policy)
        big, small = result.ledger.to_json()
        assert big["dropped"] == {"memory": 2} and small["processed"] == 2


def job(query: str, seconds: float, deadline: float, density: float) -> Job:
    return Job(query, 1, (), 0.0, seconds, deadline, 1.0, density)


def test_when_not_all_can_be_in_time_those_that_bring_least_for_their_time_are_given_up():
    quick, slow, late = job("quick", 1, 3, 1.0), job("slow", 3, 4, 0.3), job("late", 1, 4.5, 1.0)
    assert in_time_together(0.0, [late, slow, quick]) == [quick, late]
    assert in_time_together(0.0, [quick, late]) == [quick, late]
    urgent = job("urgent", 4, 4.2, 50.0)
    assert in_time_together(0.0, [quick, urgent, late]) == [urgent], "one that counts most displaces several"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=7))
def test_jobs_worth_the_same_are_kept_as_many_as_any_choice_can_keep(sizes):
    """Moore and Hodgson's theorem: with worth per second the inverse of the length, none keeps more."""
    jobs = [job(f"j{i}", seconds, deadline, 1 / seconds) for i, (seconds, deadline) in enumerate(sizes)]
    kept = in_time_together(0.0, jobs)
    clock = 0.0
    for one in kept:
        clock += one.seconds
        assert clock <= one.deadline + 1e-6
    best = 0
    for chosen in range(1 << len(jobs)):
        clock, good = 0.0, True
        for one in sorted((one for i, one in enumerate(jobs) if chosen >> i & 1), key=lambda one: one.deadline):
            clock += one.seconds
            good = good and clock <= one.deadline
        best = max(best, chosen.bit_count()) if good else best
    assert len(kept) == best


def test_ours_stays_with_a_loaded_query_where_the_paper_swaps_at_every_turn():
    """Loads of 80 ms, runs of 5 ms, frames every 50 ms with 200 ms to go: swapping takes longer than frames do."""
    costs = Costs({query: QueryCost((query,), 0.005, 0, 0.2) for query in "ab"}, {"a": 80_000, "b": 80_000}, 1e6)
    arrivals = {"a": [i / 20 for i in range(400)], "b": [0.01 + i / 20 for i in range(400)]}
    outcome = {name: simulate(costs, arrivals, 100_000, POLICIES[name]) for name in ("adaptive", "gemel")}
    processed = {name: [row["processed"] for row in result.per_query()] for name, result in outcome.items()}
    assert sum(processed["adaptive"]) > sum(processed["gemel"])
    assert all(ours >= 0.8 * paper for ours, paper in zip(processed["adaptive"], processed["gemel"], strict=True))


def test_a_free_choice_runs_what_waits_together_and_leaves_a_batch_that_drives_out_weights():
    larger = (BatchCost(2, 0.012, 1 * KIB), BatchCost(4, 0.016, 16 * KIB), BatchCost(8, 0.024, 32 * KIB))
    costs = Costs(
        {"a": QueryCost(("a",), 0.010, 1 * KIB, 0.5, larger), "b": QueryCost(("b",), 0.010, 0, 0.5)},
        {"a": 4 * KIB, "b": 40_960},
        1e5,
    )
    policy = policy_named("adaptive")
    plan = policy.plan(costs, {"a": QuerySpec(10), "b": QuerySpec(10)}, 64 * KIB)
    four = {"a": (0.0, 0.1, 0.2, 0.3)}
    alone = chosen_freely(costs, plan, situation_of(costs, 0.3, four, {"a"}))
    beside = chosen_freely(costs, plan, situation_of(costs, 0.3, four, {"a", "b"}))
    tight = policy.plan(costs, {"a": QuerySpec(10), "b": QuerySpec(10)}, 48 * KIB)
    crowded = chosen_freely(costs, tight, situation_of(costs, 0.3, four, {"a", "b"}))
    assert (alone.count, beside.count, beside.evict) == (4, 4, ())
    assert (crowded.count, crowded.evict) == (2, ()), "a batch of four would cost b's weights, 0.4 s to bring back"


def test_a_free_slot_goes_to_the_query_whose_stale_results_cost_most():
    costs = Costs({query: QueryCost((query,), 0.06, 0, 0.1) for query in "ab"}, {"a": 512, "b": 512}, 1e6)
    policy = policy_named("adaptive")
    plan = policy.plan(costs, {"a": QuerySpec(10), "b": QuerySpec(10)}, 4 * KIB)
    waiting = {"a": (0.0,), "b": (0.0,)}
    for urgency, chosen in (({"a": 4.0}, "a"), ({"b": 4.0}, "b")):
        decision = chosen_freely(costs, plan, situation_of(costs, 0.0, waiting, {"a", "b"}, urgency=urgency))
        assert decision.query == chosen
    priority = policy.plan(costs, {"a": QuerySpec(10, 1.0), "b": QuerySpec(10, 3.0)}, 4 * KIB)
    assert chosen_freely(costs, priority, situation_of(costs, 0.0, waiting, {"a", "b"})).query == "b"


def test_time_sharing_keeps_a_copy_for_each_query_and_moves_whole_models():
    costs = three_alike()
    arrivals = {query: [i / 4 for i in range(8)] for query in "abc"}
    shared, whole = (simulate(costs, arrivals, 8 * KIB, POLICIES[name]) for name in ("gemel", "time-sharing"))
    assert whole.bytes_moved == 24 * 8 * KIB and shared.bytes_moved == 24 * 4 * KIB + 4 * KIB
    assert simulate(costs, arrivals, 24 * KIB, POLICIES["time-sharing"]).bytes_moved == 24 * KIB
