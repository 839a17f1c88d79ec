"""Joint passes in the schedule: who joins a run, and what that brings on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemel.edge_runtime.policies import policy_named
from gemel.edge_runtime.scheduler import Decision, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost, unshared_costs
from gemel.edge_runtime.scheduler.joint import join_queries, run_seconds, wait_for_pass
from gemel.edge_runtime.simulation.simulator import simulate

KIB = 1024
QUERIES = ("a", "b", "c")


def make_costs(alone_s: float = 0.03, joint_s: float = 0.04, sla_s: float = 0.1, alone_kib: int = 1) -> Costs:
    """`a`, `b` and `c` tie a large tensor and have a small one of their own; a joint frame more takes 1 ms."""
    batches = (BatchCost(1, alone_s, KIB), BatchCost(8, 8 * alone_s, KIB))
    queries = {query: QueryCost.of_batches(("tied", query), sla_s, batches) for query in QUERIES}
    sizes = {"tied": 64 * KIB, **dict.fromkeys(QUERIES, alone_kib * KIB)}
    joint = QueryCost.of_batches((), sla_s, (BatchCost(1, joint_s, KIB), BatchCost(8, joint_s + 0.007, 8 * KIB)))
    return Costs(queries, sizes, 1e9, joint=(JointCost(QUERIES, joint),))


def join(costs: Costs, waiting, budget: int = 1024 * KIB, resident=("tied", "a", "b", "c"), drop=()) -> Decision:
    specs = {query: QuerySpec(10.0) for query in QUERIES}
    plan = policy_named("gemel").plan(costs, specs, budget)
    held = costs.resident_bytes(resident)
    state = SchedulerState(0.05, waiting, frozenset(resident), held)
    missing = tuple(name for name in costs.queries["a"].tensors if name not in resident)
    return join_queries(Decision("a", 1, load=missing, drop=drop), state, costs, plan)


def test_queries_join_a_run_with_their_frames():
    decision = join(make_costs(), {"a": (0.05,), "b": (0.05,), "c": (0.02, 0.04)})
    assert decision.runs == (("a", 1), ("c", 2), ("b", 1))
    assert run_seconds(make_costs(), decision.runs) == pytest.approx(0.043)


def test_query_whose_pass_saves_nothing_stays_out():
    assert join(make_costs(alone_s=0.001), {"a": (0.05,), "b": (0.05,)}).also == ()


def test_query_that_would_make_a_frame_late_stays_out():
    assert join(make_costs(joint_s=0.08), {"a": (0.0,), "b": (0.05,)}).also == ()
    late = join(make_costs(), {"a": (0.05,), "b": (-0.1, 0.05)})
    assert late.also == (("b", 1),) and late.drop == (("b", -0.1, "deadline"),)


def test_query_joins_only_where_memory_suffices():
    costs = make_costs(alone_kib=4)
    resident = ("tied", "a")
    assert join(costs, {"a": (0.05,), "b": (0.05,)}, 80 * KIB, resident).load == ("b",)
    assert join(costs, {"a": (0.05,), "b": (0.05,)}, 70 * KIB, resident).also == ()


def test_joining_query_evicts_what_no_query_of_the_run_needs():
    decision = join(make_costs(alone_kib=4), {"a": (0.05,), "b": (0.05,)}, 77 * KIB, ("tied", "a", "c"))
    assert decision.also == (("b", 1),) and decision.evict == ("c",) and decision.load == ("b",)


def test_frames_that_the_decision_drops_do_not_run():
    drop = (("b", 0.05, "replaced"),)
    assert join(make_costs(), {"a": (0.05,), "b": (0.05, 0.06)}, drop=drop).also == (("b", 1),)


def test_policy_without_sharing_has_no_joint_pass():
    assert unshared_costs(make_costs()).joint == ()


@pytest.mark.parametrize("policy", ["gemel", "adaptive"])
def test_joint_passes_bring_frames_in_time_and_no_query_pays(policy):
    costs, times = make_costs(joint_s=0.034), {query: [0.001 * place + 0.05 * index for index in range(200)]
                                               for place, query in enumerate(QUERIES)}  # fmt: skip
    alone, together = (simulate(one, times, 1024 * KIB, policy_named(policy)) for one in (costs.with_joint(()), costs))
    before, after = (
        {row["id"]: row["processed"] - row["late"] for row in one.per_query()} for one in (alone, together)
    )
    assert alone.joint_runs == 0 and together.joint_runs > 100
    assert sum(after.values()) > 1.5 * sum(before.values())
    assert all(after[query] >= 0.95 * before[query] for query in QUERIES)
    assert together.ledger.balanced and together.max_used_bytes <= 1024 * KIB


def test_gemel_cycle_goes_on_after_a_joint_run():
    costs = make_costs()
    queries = {**costs.queries, "d": QueryCost(("d",), 0.03, KIB, 0.1)}
    costs = Costs(queries, {**costs.tensor_bytes, "d": KIB}, 1e9, joint=costs.joint)
    times = {query: [0.04 * index for index in range(200)] for query in queries}
    found = simulate(costs, times, 1024 * KIB, policy_named("gemel"))
    shares = {row["id"]: row["processed"] for row in found.per_query()}
    assert min(shares.values()) > 40


def wait(
    newest, waiting=None, sla_s: float = 0.2, joint_s: float = 0.04, resident=("tied", "a", "b"), c_sla_s: float = 0.2
) -> float | None:
    costs, specs = make_costs(joint_s=joint_s, sla_s=sla_s), {query: QuerySpec(10.0) for query in QUERIES}
    costs = replace(costs, queries={**costs.queries, "c": replace(costs.queries["c"], sla_s=c_sla_s)})
    state = SchedulerState(0.05, waiting or {"a": (0.05,)}, frozenset(resident), costs.resident_bytes(resident))
    return wait_for_pass(Decision("a", 1), state, costs, specs, newest)


def test_run_waits_for_the_frame_that_its_pass_takes_next():
    assert wait({"a": 0.05, "b": -0.02}) == pytest.approx(0.09)
    assert wait({"a": 0.05, "b": -0.02, "c": -0.03}) == pytest.approx(0.09), "c is not resident"


@pytest.mark.parametrize(
    "case",
    [
        {"newest": {"a": 0.05}},
        {"newest": {"b": -0.08}},
        {"newest": {"b": -0.02}, "waiting": {"a": (0.05,), "c": (0.05,)}},
        {"newest": {"b": -0.02}, "joint_s": 0.07},
        {"newest": {"b": -0.02}, "sla_s": 0.1},
        {"newest": {"b": -0.02, "c": 0.0}, "c_sla_s": 0.1},
        {"newest": {"b": 0.04}, "sla_s": 2.0, "waiting": {"a": tuple(0.05 - 0.1 * age for age in range(7, -1, -1))}},
    ],
    ids=["never seen", "overdue", "other work", "saves nothing", "no time", "others behind it", "full mailbox"],
)
def test_run_begins_where_waiting_could_cost_a_frame(case):
    assert wait(**case) is None


def test_idle_box_runs_queries_of_a_pass_together_in_time():
    costs = make_costs(sla_s=0.2)
    arrivals = {query: [0.1 * index + 0.01 * place for index in range(100)] for place, query in enumerate(QUERIES)}
    specs = {query: QuerySpec(10.0) for query in QUERIES}
    played = simulate(costs, arrivals, 1024 * KIB, policy_named("adaptive"), specs)
    assert [row["processed"] - row["late"] for row in played.per_query()] == [100] * 3
    assert played.joint_runs > 90
