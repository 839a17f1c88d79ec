"""Costs: bytes and times of loads and runs, what measurements change in them, tensor groups, memory settings."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.edge_runtime.scheduler.costs import (
    RATE_FROM_BYTES,
    BatchCost,
    CostEstimates,
    Costs,
    JointCost,
    QueryCost,
    memory_bytes,
    memory_settings,
    parse_memory,
    tensor_groups,
    unshared_costs,
)
from gemel.models.errors import InputError
from tests.edge_runtime.scheduler import strategies


def two_queries() -> Costs:
    return Costs(
        {"a": QueryCost(("s", "x"), 0.01, 100, 0.1), "b": QueryCost(("s",), 0.02, 900, 0.1)},
        {"s": 1000, "x": 512},
        copy_bytes_per_s=1e6,
        load_latency_s=0.001,
    )


def test_footprint_bytes_are_units_of_512():
    assert [footprint_bytes(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_costs_move_stored_bytes_and_occupy_footprints():
    costs = two_queries()
    assert costs.moved_bytes(("s", "x")) == 1512
    assert costs.weights_bytes("a") == 1024 + 512
    assert costs.alone_bytes("b") == 1024 + 900


def test_load_s_has_the_latency_once():
    costs = two_queries()
    assert costs.load_s(0) == 0
    assert costs.load_s(1000) == pytest.approx(0.002)


def test_costs_unknown_tensor_is_refused():
    with pytest.raises(ValueError, match="query a"):
        Costs({"a": QueryCost(("t",), 0.01, 0, 0.1)}, {}, 1e6)


def test_with_query_replaces_one_run_time():
    costs = two_queries()
    costs = costs.with_query("b", costs.queries["b"].with_run_s(0.5))
    assert (costs.queries["a"].run_s, costs.queries["b"].run_s) == (0.01, 0.5)


@given(strategies.costs())
def test_unshared_costs_share_nothing_and_weigh_the_same(costs):
    alone = unshared_costs(costs)
    for query, cost in costs.queries.items():
        assert alone.weights_bytes(query) == costs.weights_bytes(query)
        assert alone.moved_bytes(alone.queries[query].tensors) == costs.moved_bytes(cost.tensors)
        assert not any(
            alone.queries[query].needed & alone.queries[other].needed for other in costs.queries if other != query
        )


def estimates(run_s: float = 0.02) -> CostEstimates:
    larger = (BatchCost(2, 1.5 * run_s, 10), BatchCost(4, 2.5 * run_s, 20))
    return CostEstimates(Costs({"q": QueryCost(("t",), run_s, 5, 0.1, larger)}, {"t": 512}, 1e9))


def test_record_run_slow_batch_scales_all_batches():
    known = estimates()
    for _ in range(60):
        known.record_run("q", 4, 0.1)
    cost = known.costs.queries["q"]
    assert cost.run_of(4) == pytest.approx(0.1, rel=1e-3)
    assert (cost.run_of(2), cost.run_s) == pytest.approx((0.06, 0.04), rel=0.15)


def test_record_run_batch_out_of_proportion_leaves_single_frames():
    known = estimates()
    for _ in range(100):
        known.record_run("q", 1, 0.02)
        known.record_run("q", 2, 0.09)
    cost = known.costs.queries["q"]
    assert known.mean_s("q") == pytest.approx(0.02, rel=0.05)
    assert (cost.run_of(2), cost.run_of(4)) == pytest.approx((0.1, 0.1), rel=0.1), "four take no less than two"
    for _ in range(100):
        known.record_run("q", 1, 0.02)
        known.record_run("q", 2, 0.01)
    assert known.costs.queries["q"].run_of(2) == known.costs.queries["q"].run_s, "two take no less than one"


def test_record_run_one_stall_leaves_runs_within_the_sla():
    known = estimates()
    known.record_run("q", 1, 1.02)
    assert known.mean_s("q") == pytest.approx(0.02 + 0.2 * (3 - 1) * 0.02)
    assert known.costs.queries["q"].run_s < 0.07, "of an SLA of 0.1, however long the stall"
    for _ in range(40):
        known.record_run("q", 1, 0.02)
    assert known.costs.queries["q"].run_s < 0.025


def test_record_run_lasting_slowness_is_followed_within_ten_runs():
    known = estimates()
    for _ in range(10):
        known.record_run("q", 1, 0.09)
    assert known.mean_s("q") > 0.07


def test_record_run_varying_times_are_expected_to_vary():
    known = estimates()
    for seconds in 40 * (0.018, 0.022):
        known.record_run("q", 1, seconds)
    assert known.mean_s("q") == pytest.approx(0.02, rel=0.02)
    assert 0.022 < known.costs.queries["q"].run_s < 0.03
    for _ in range(60):
        known.record_run("q", 1, 0.02)
    assert known.costs.queries["q"].run_s == pytest.approx(0.02, rel=1e-3)


def test_record_run_varying_batches_leave_steady_single_frames():
    known = estimates(run_s=0.01)
    for seconds in 60 * (0.022, 0.028):
        known.record_run("q", 4, seconds)
        for _ in range(3):
            known.record_run("q", 1, 0.01)
    cost = known.costs.queries["q"]
    assert cost.run_of(4) > 0.03, "in time although a batch takes up to 0.028"
    assert cost.run_s < 0.0125


def test_record_run_varying_much_stays_within_the_sla():
    known = estimates(run_s=0.07)
    for seconds in 40 * (0.05, 0.09):
        known.record_run("q", 1, seconds)
    assert 0.07 < known.mean_s("q") < 0.075 and known.costs.queries["q"].run_s < 0.09


def test_record_joint_expects_variation_and_leaves_the_queries():
    costs = two_queries()
    passed = JointCost(("a", "b"), QueryCost((), 0.01, 5, 0.1, (BatchCost(2, 0.02, 10),)))
    known = CostEstimates(costs.with_joint((passed,)))
    for seconds in 40 * (0.027, 0.033):
        known.record_joint("b", 2, seconds)
    (found,) = known.costs.joint
    assert 0.033 < found.cost.run_of(2) < 0.05 and found.queries == ("a", "b")
    assert known.costs.queries == costs.queries


def test_record_load_small_load_is_ignored():
    known = estimates()
    known.record_load("q", RATE_FROM_BYTES - 1, 1.0)
    assert known.costs.copy_bytes_per_s == 1e9
    known.record_load("q", RATE_FROM_BYTES * 100, RATE_FROM_BYTES * 100 / 2e9)
    assert known.costs.copy_bytes_per_s == pytest.approx(1.2e9)


def test_lower_run_s_too_slow_query_falls_below_its_sla():
    known = estimates(run_s=0.5)
    for _ in range(100):
        known.lower_run_s("q")
    assert known.costs.queries["q"].run_s < 0.1
    assert known.costs.queries["q"].run_of(4) == pytest.approx(2.5 * known.costs.queries["q"].run_s)


def test_set_measured_unknown_times_scale_with_the_batch():
    known = CostEstimates(Costs({"q": QueryCost(("t",), 0.0, 5, 0.1, (BatchCost(2, 0.0, 10),))}, {"t": 512}, 1e9))
    known.set_measured({"q": 0.03}, 2e9)
    assert known.costs.queries["q"].run_of(2) == pytest.approx(0.06) and known.costs.copy_bytes_per_s == 2e9


@given(strategies.costs(), st.integers(1, 60_000))
def test_tensor_groups_keep_all_costs(costs, piece_bytes):
    small = tensor_groups(costs, piece_bytes).costs
    assert set(small.queries) == set(costs.queries) and len(small.tensor_bytes) <= len(costs.tensor_bytes)
    for a, b in product(costs.queries, repeat=2):
        before, after = (one.queries[a].needed & one.queries[b].needed for one in (costs, small))
        assert small.moved_bytes(after) == costs.moved_bytes(before)
        assert small.resident_bytes(after) == costs.resident_bytes(before)


@given(st.data())
def test_tensor_groups_hold_every_tensor_once(data):
    costs = data.draw(strategies.costs())
    pieces = tensor_groups(costs, data.draw(st.integers(1, 60_000)))
    needed = {name for cost in costs.queries.values() for name in cost.needed}
    assert sorted(pieces.tensor_names(pieces.costs.tensor_bytes)) == sorted(needed)
    query = data.draw(st.sampled_from(list(costs.queries)))
    mine = pieces.costs.queries[query].needed
    assert set(pieces.tensor_names(mine)) == costs.queries[query].needed
    assert pieces.resident_groups(costs.queries[query].needed) >= mine
    for name in costs.queries[query].needed:
        assert not pieces.resident_groups(costs.queries[query].needed - {name}) >= mine


ORIGINALS = Costs(
    {"a": QueryCost(("a1", "a2"), 0.01, 1000, 0.1), "b": QueryCost(("b1",), 0.01, 5000, 0.1)},
    {"a1": 5120, "a2": 1024, "b1": 512},
    1e6,
)


def test_memory_settings_run_from_min_to_all():
    settings = memory_settings(ORIGINALS)
    assert settings["min"] == 5120 + 1024 + 1000
    assert settings["all"] == 5120 + 1024 + 512 + 5000
    assert settings["50%"] == settings["min"] + (settings["all"] - settings["min"]) // 2
    assert settings["min"] < settings["50%"] < settings["75%"] < settings["all"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("4096", 4096), (4096, 4096), ("10B", 10)],
)
def test_parse_memory_reads_both_systems_of_units(text, nbytes):
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "512 MiBs", "-1MiB", "0", 0, True, None, 1.5, "1e9", "GB"])
def test_parse_memory_no_size_is_refused(text):
    with pytest.raises(InputError, match=r"^box\.yaml: budget: .*; write a size"):
        parse_memory(text, "box.yaml", "budget")


def test_memory_bytes_takes_a_name_or_a_size():
    assert memory_bytes("min", ORIGINALS) == 7144
    assert memory_bytes("1KiB", ORIGINALS) == 1024
