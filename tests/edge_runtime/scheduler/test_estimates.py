"""How measured times change what the schedule believes."""

from __future__ import annotations

import pytest

from edge_runtime.scheduler.costs import RATE_FROM_BYTES, BatchCost, CostEstimates, Costs, QueryCost


def estimates(run_s: float = 0.02) -> CostEstimates:
    larger = (BatchCost(2, 1.5 * run_s, 10), BatchCost(4, 2.5 * run_s, 20))
    return CostEstimates(Costs({"q": QueryCost(("t",), run_s, 5, 0.1, larger)}, {"t": 512}, 1e9))


def test_a_throttled_box_is_followed_for_every_batch_whichever_ran():
    known = estimates()
    for _ in range(40):
        known.record_run("q", 4, 0.1)
    cost = known.costs.queries["q"]
    assert (cost.run_of(4), cost.run_of(2), cost.run_s) == pytest.approx((0.1, 0.06, 0.04), rel=1e-3)


def test_one_stall_moves_the_estimate_by_a_fifth_of_itself():
    known = estimates()
    known.record_run("q", 1, 1.02)
    assert known.costs.queries["q"].run_s == pytest.approx(0.22)


def test_only_loads_large_enough_say_something_about_the_rate():
    known = estimates()
    known.record_load("q", RATE_FROM_BYTES - 1, 1.0)
    assert known.costs.copy_bytes_per_s == 1e9
    known.record_load("q", RATE_FROM_BYTES * 100, RATE_FROM_BYTES * 100 / 2e9)
    assert known.costs.copy_bytes_per_s == pytest.approx(1.2e9)


def test_a_query_believed_too_slow_is_doubted_into_its_sla():
    known = estimates(run_s=0.5)
    for _ in range(100):
        known.lower_run_s("q")
    assert known.costs.queries["q"].run_s < 0.1
    assert known.costs.queries["q"].run_of(4) == pytest.approx(2.5 * known.costs.queries["q"].run_s)


def test_times_unknown_at_the_start_are_learned_and_batches_assumed_to_save_nothing():
    known = CostEstimates(Costs({"q": QueryCost(("t",), 0.0, 5, 0.1, (BatchCost(2, 0.0, 10),))}, {"t": 512}, 1e9))
    known.set_measured({"q": 0.03}, 2e9)
    assert known.costs.queries["q"].run_of(2) == pytest.approx(0.06) and known.costs.copy_bytes_per_s == 2e9
