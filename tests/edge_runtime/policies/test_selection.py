"""Which scheduler runs: when both are compared, what wins, and what each query keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.policies.selection import CONFIG, SelectionState, expected_frames, has_drifted
from gemel.edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import Costs, QueryCost
from gemel.edge_runtime.simulation.simulator import Simulation, simulate

SELECTING = POLICIES["adaptive"]
SECONDS = 40


def swapping() -> Costs:
    """Two queries that do not fit together; a swap takes 80 ms, a run 5 ms, a frame may wait 200 ms."""
    return Costs({query: QueryCost((query,), 0.005, 0, 0.2) for query in "ab"}, {"a": 80_000, "b": 80_000}, 1e6)


def frames(fps: float, phase: float = 0.0) -> list[float]:
    return [(phase + index) / fps for index in range(int(SECONDS * fps))]


class Recorded:
    """A policy that keeps what it remembered at every decision."""

    name = "adaptive"

    def __init__(self) -> None:
        self.states: list[tuple[float, SelectionState]] = []

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs, budget_bytes: int) -> Plan:
        return SELECTING.plan(costs, specs, budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        decision = SELECTING.decide(state, costs, plan)
        self.states.append((state.now, decision.policy_state))
        return decision


def play(costs: Costs, specs: dict[str, QuerySpec], budget: int) -> tuple[Simulation, Recorded]:
    recorded = Recorded()
    arrivals = {query: frames(spec.fps, place / 3) for place, (query, spec) in enumerate(specs.items())}
    return simulate(costs, arrivals, budget, recorded, specs), recorded


def test_selection_swapping_costs_more_takes_the_greedy_scheduler():
    specs = {query: QuerySpec(20.0) for query in "ab"}
    played, recorded = play(swapping(), specs, 100_000)
    first = next(now for now, memory in recorded.states if memory.floor_rates is not None)
    assert CONFIG.min_settle_s < first < SECONDS / 2
    before = [memory for now, memory in recorded.states if now < first]
    assert all(memory.floor_rates is None for memory in before), "gemel runs until the comparison is over"
    arrivals = {query: frames(20.0, place / 3) for place, query in enumerate("ab")}
    gemel = simulate(swapping(), arrivals, 100_000, POLICIES["gemel"], specs)
    mine, theirs = ([row["processed"] for row in one.per_query()] for one in (played, gemel))
    assert sum(mine) > sum(theirs) and all(a >= 0.8 * b for a, b in zip(mine, theirs, strict=True))


def test_selection_everything_resident_stays_with_gemel():
    played, recorded = play(swapping(), {query: QuerySpec(20.0) for query in "ab"}, 200_000)
    assert all(memory.floor_rates is None for _, memory in recorded.states)
    assert any(memory.compared is not None for _, memory in recorded.states), "both were compared"
    assert all(row["dropped"] == 0 for row in played.per_query())


def test_selection_accuracy_objective_begins_greedy():
    curve = (1.0, 0.6, 0.3)
    _, recorded = play(swapping(), {query: QuerySpec(20.0, 1.0, curve) for query in "ab"}, 100_000)
    assert recorded.states[0][1].floor_rates is not None


def test_selection_floor_broken_in_simulation_keeps_gemel(monkeypatch):
    monkeypatch.setattr(
        "gemel.edge_runtime.policies.selection.CONFIG", replace(CONFIG, query_share=9.0, query_slack=0.0)
    )
    _, recorded = play(swapping(), {query: QuerySpec(20.0) for query in "ab"}, 100_000)
    assert all(memory.floor_rates is None for _, memory in recorded.states)


def test_decide_same_state_twice_gives_the_same_decision():
    """The comparison in a state is played once, however often `decide` is called."""
    costs, specs = swapping(), {query: QuerySpec(20.0) for query in "ab"}
    plan, memory, chosen = SELECTING.plan(costs, specs, 100_000), None, []
    for step in range(400):
        now = step / 40
        state = SchedulerState(now, {"a": (now,), "b": (now,)}, frozenset("a"), 80_384, memory)
        once, twice = (SELECTING.decide(state, costs, plan) for _ in range(2))
        assert replace(once, policy_state=None) == replace(twice, policy_state=None)
        assert once.policy_state.floor_rates == twice.policy_state.floor_rates
        memory = once.policy_state
        chosen.append(memory.floor_rates is not None)
    assert memory is not None and memory.compared is not None


@pytest.mark.parametrize(("factor", "drifted"), [(1.2, False), (1.3, True), (0.7, True)])
def test_has_drifted_run_time_changes_by_a_quarter(factor, drifted):
    costs, specs = swapping(), {"a": QuerySpec(20.0), "b": QuerySpec(20.0)}
    plan = SELECTING.plan(costs, specs, 100_000)
    state = SchedulerState(1.0, {"a": (1.0,), "b": (1.0,)}, frozenset(), 0)
    memory = SELECTING.decide(state, costs, plan).policy_state
    memory = replace(memory, compared=(costs, frozenset("ab")))
    assert not has_drifted(memory, 1.0, costs, specs)
    assert (
        has_drifted(memory, 1.0, costs.with_query("a", costs.queries["a"].with_run_s(0.005 * factor)), specs) == drifted
    )
    assert has_drifted(memory, 2.0, costs, specs), "no query has received a frame for more than its periods"


def test_expected_frames_go_on_at_each_rate():
    costs, specs = swapping(), {"a": QuerySpec(2.0), "b": QuerySpec(20.0)}
    state = SchedulerState(1.0, {"a": (0.9,)}, frozenset(), 0)
    history = SELECTING.decide(state, costs, SELECTING.plan(costs, specs, 100_000)).policy_state.history
    assert [at for at, _, _ in expected_frames(history, frozenset("a"), specs, 1.0, 2.5)] == [1.4, 1.9, 2.4]


def test_decide_less_memory_than_planned_keeps_the_new_budget():
    """A box whose device ran out of memory plans again, and goes on with what it remembers."""
    costs, specs = swapping(), {"a": QuerySpec(20.0, 1.0, (1.0, 0.5)), "b": QuerySpec(20.0, 1.0, (1.0, 0.5))}
    before, after = (SELECTING.plan(costs, specs, budget) for budget in (200_000, 80_384))
    state = SchedulerState(1.0, {"a": (1.0,)}, frozenset("a"), 80_384)
    memory = SELECTING.decide(state, costs, before).policy_state
    decision = SELECTING.decide(SchedulerState(1.1, {"b": (1.1,)}, frozenset("a"), 80_384, memory), costs, after)
    assert (decision.query, decision.evict, decision.load) == ("b", ("a",), ("b",))
