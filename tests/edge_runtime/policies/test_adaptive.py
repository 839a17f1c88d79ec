"""The greedy scheduler: batches, loads, weights and accuracy over time in single decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.policies.adaptive import AdaptivePolicy, CandidateRun, RunHistory, feasible_together
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import simulate

KIB = 1024
POLICY = AdaptivePolicy()


def decide(
    costs: Costs, plan: Plan, now: float, waiting, resident: Iterable[str] = (), history=None, urgency=None
) -> Decision:
    held = frozenset(resident)
    state = SchedulerState(now, waiting, held, costs.resident_bytes(held), history, urgency or {})
    return POLICY.decide(state, costs, plan)


def candidate(query: str, seconds: float, deadline: float, density: float) -> CandidateRun:
    return CandidateRun(query, 1, seconds, deadline, density)


def test_feasible_together_overload_drops_least_density():
    quick, slow, late = candidate("quick", 1, 3, 1.0), candidate("slow", 3, 4, 0.3), candidate("late", 1, 4.5, 1.0)
    assert feasible_together(0.0, [late, slow, quick]) == [quick, late]
    assert feasible_together(0.0, [quick, late]) == [quick, late]
    urgent = candidate("urgent", 4, 4.2, 50.0)
    assert feasible_together(0.0, [quick, urgent, late]) == [urgent], "one that counts most displaces several"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=7))
def test_feasible_together_equal_runs_keeps_as_many_as_any_choice(sizes):
    """Moore and Hodgson's theorem: with utility per second the inverse of the length, none keeps more."""
    runs = [candidate(f"j{i}", seconds, deadline, 1 / seconds) for i, (seconds, deadline) in enumerate(sizes)]
    kept = feasible_together(0.0, runs)
    clock = 0.0
    for one in kept:
        clock += one.seconds
        assert clock <= one.deadline + 1e-6
    best = 0
    for chosen in range(1 << len(runs)):
        clock, good = 0.0, True
        for one in sorted((one for i, one in enumerate(runs) if chosen >> i & 1), key=lambda one: one.deadline):
            clock += one.seconds
            good = good and clock <= one.deadline
        best = max(best, chosen.bit_count()) if good else best
    assert len(kept) == best


def test_decide_waiting_frames_run_in_the_largest_batch():
    larger = (BatchCost(2, 0.012, 1 * KIB), BatchCost(4, 0.016, 16 * KIB), BatchCost(8, 0.024, 32 * KIB))
    costs = Costs(
        {"a": QueryCost(("a",), 0.010, 1 * KIB, 0.5, larger), "b": QueryCost(("b",), 0.010, 0, 0.5)},
        {"a": 4 * KIB, "b": 40_960},
        1e5,
    )
    specs, four = {"a": QuerySpec(10), "b": QuerySpec(10)}, {"a": (0.0, 0.1, 0.2, 0.3)}
    plan, tight = (POLICY.plan(costs, specs, budget) for budget in (64 * KIB, 48 * KIB))
    alone, beside = (decide(costs, plan, 0.3, four, resident) for resident in ("a", "ab"))
    crowded = decide(costs, tight, 0.3, four, "ab")
    assert (alone.count, beside.count, beside.evict) == (4, 4, ())
    assert (crowded.count, crowded.evict) == (4, ("b",))


def test_decide_equal_runs_takes_the_most_urgent():
    costs = Costs({query: QueryCost((query,), 0.06, 0, 0.1) for query in "ab"}, {"a": 512, "b": 512}, 1e6)
    plan = POLICY.plan(costs, {"a": QuerySpec(10), "b": QuerySpec(10)}, 4 * KIB)
    waiting = {"a": (0.0,), "b": (0.0,)}
    for urgency, chosen in (({"a": 4.0}, "a"), ({"b": 4.0}, "b")):
        assert decide(costs, plan, 0.0, waiting, "ab", urgency=urgency).query == chosen
    priority = POLICY.plan(costs, {"a": QuerySpec(10, 1.0), "b": QuerySpec(10, 3.0)}, 4 * KIB)
    assert decide(costs, priority, 0.0, waiting, "ab").query == "b"


def test_decide_query_below_its_floor_takes_the_slot():
    costs = Costs({query: QueryCost((query,), 0.06, 0, 0.1) for query in "ab"}, {"a": 512, "b": 512}, 1e6)
    plan = POLICY.plan(costs, {"a": QuerySpec(10, 1.5), "b": QuerySpec(10)}, 4 * KIB)
    floors = replace(plan, data=replace(plan.data, floor_rates={"b": 5.0}))
    waiting = {"a": (9.99,), "b": (9.99,)}
    fed, starved = (RunHistory(0.0, {"a": 50, "b": count}) for count in (60, 30))
    assert decide(costs, floors, 10.0, waiting, "ab", fed).query == "a"
    assert decide(costs, floors, 10.0, waiting, "ab", starved).query == "b"


def test_decide_starved_query_is_loaded_ahead():
    costs = Costs({query: QueryCost((query,), 0.06, 0, 0.1) for query in "ab"}, {"a": 512, "b": 200_000}, 1e6)
    plan = POLICY.plan(costs, {"a": QuerySpec(10), "b": QuerySpec(10)}, 400 * KIB)
    floors = replace(plan, data=replace(plan.data, floor_rates={"b": 5.0}))
    starved = RunHistory(0.0, {"a": 50}, newest={"b": 9.99})
    ahead = decide(costs, floors, 10.0, {"a": (9.99,), "b": (9.99,)}, "a", starved)
    assert (ahead.query, ahead.count, ahead.load) == ("b", 0, ("b",)), "its load takes 0.2 s, its frame would be late"


def test_decide_staleness_runs_the_newest_frame_that_gains_most():
    costs = Costs({query: QueryCost((query,), 0.02, 0, 0.5) for query in "ab"}, {"a": 512, "b": 512}, 1e6)
    slow, fast = (1.0, 0.99, 0.98), (1.0, 0.5, 0.2)
    plan = POLICY.plan(costs, {"a": QuerySpec(10, 1.0, slow), "b": QuerySpec(10, 1.0, fast)}, 4 * KIB)
    history = RunHistory(0.0, answered={"a": 0.7, "b": 0.7})
    decision = decide(costs, plan, 1.0, {"a": (0.9, 1.0), "b": (0.9, 1.0)}, "ab", history)
    assert (decision.query, decision.count) == ("b", 1)
    assert set(decision.drop) == {("a", 0.9, "replaced"), ("b", 0.9, "replaced")}
    assert decision.policy_state.answered == {"a": 0.7, "b": 1.0}


def test_greedy_long_loads_swaps_less_than_gemel():
    """Loads of 80 ms, runs of 5 ms, frames every 50 ms with 200 ms to go: swapping takes longer than frames do."""
    costs = Costs({query: QueryCost((query,), 0.005, 0, 0.2) for query in "ab"}, {"a": 80_000, "b": 80_000}, 1e6)
    arrivals = {"a": [i / 20 for i in range(100)], "b": [0.01 + i / 20 for i in range(100)]}
    greedy, gemel = (simulate(costs, arrivals, 100_000, policy) for policy in (POLICY, GemelPolicy()))
    assert greedy.swaps < gemel.swaps
    processed = [sum(row["processed"] for row in played.per_query()) for played in (greedy, gemel)]
    assert processed[0] > processed[1]
