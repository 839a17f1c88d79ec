"""The executor: it measures what runs cost, pauses what fails, and reports a step that hangs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.life.executor import (
    CLOSED,
    HALF_OPEN,
    HANG_FACTOR,
    MAX_IDLE_S,
    MAX_POLICY_FAILURES,
    MAX_QUERY_FAILURES,
    MAX_WATCH_GAP_S,
    MIN_HANG_S,
    OPEN,
    WATCH_INTERVAL_S,
    Activity,
    Breaker,
    PolicyFailed,
    Watchdog,
)
from gemel.edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs
from tests.edge_runtime.stub_box import IMAGE, NEEDS, StubBox, expected_label


def feed_steps(box: StubBox, frames: int) -> list[bool]:
    """One new frame and one step after another; whether each step ran."""
    has_run = []
    for _ in range(frames):
        box.put("a")
        has_run.append(box.executor.step())
        box.clock.now += 0.001
    return has_run


def test_warm_up_measures_the_best_later_run():
    box = StubBox(queries="a", seconds=[1.0, 0.03, 0.02, 0.5]).warm_up()
    assert len(box.engines["a"].batches) == 3 and box.arena.residency.resident == set(NEEDS["a"])
    assert box.executor.costs.queries["a"].run_s == pytest.approx(0.02)


def test_warm_up_disables_a_failing_query():
    box = StubBox()
    box.engines["b"].faults = [ValueError("broken")]
    box.warm_up().run("a", "b")
    box.put("b")
    assert not box.executor.step() and box.answers() == [expected_label("a")]
    assert [row["failed"] for row in box.ledger.to_json()] == [0, 2, 0] and box.ledger.balanced


def test_executor_estimates_follow_measurements():
    box = StubBox(queries="a", policy="adaptive", seconds=[0.02, 0.02, 0.02, 0.04]).warm_up()
    assert all(feed_steps(box, 60))
    assert box.executor.costs.queries["a"].run_s == pytest.approx(0.04, rel=0.01)
    assert box.executor.to_json()[0]["age_p95_ms"] == pytest.approx(40)


def test_executor_goes_on_after_a_stall_without_a_frame_lost():
    box = StubBox(queries="a", policy="adaptive", seconds=[0.02, 0.02, 0.02, 5.0, 0.02]).warm_up()
    assert all(feed_steps(box, 50)) and box.ledger.balanced


def test_executor_recovers_from_a_warm_up_that_stalled():
    box = StubBox(queries="a", policy="adaptive", seconds=[5.0, 5.0, 5.0, 0.02]).warm_up()
    has_run = feed_steps(box, 300)
    assert not all(has_run[:50]) and all(has_run[-30:]) and box.ledger.balanced


def test_executor_retries_a_too_slow_query():
    box = StubBox(queries="a", policy="adaptive", seconds=[0.15]).warm_up()
    feed_steps(box, 200)
    counts = box.counts("a")
    assert 3 < counts["processed"] == counts["late"] < 60
    assert counts["dropped"] == {"deadline": 200 - counts["processed"]}


@pytest.mark.parametrize(("pair_s", "batches"), [(0.0, [1, 1]), (0.022, [2])], ids=("unmeasured", "cheap"))
def test_executor_batches_waiting_frames(pair_s, batches):
    larger = (BatchCost(2, pair_s, 0),)
    box = StubBox(queries="a", policy="adaptive", seconds=[0.02 if pair_s else 0.0, 0.02], larger=larger, fps=80.0)
    box.warm_up()
    box.engines["a"].batches.clear()
    for captured_at in (0.0, 0.001):
        box.executor.mailboxes.put("a", Frame(0, box.clock.now + captured_at, 0.0, IMAGE))
    box.clock.now += 0.001
    box.run()
    assert box.engines["a"].batches == batches
    assert box.counts("a")["processed"] == 2 and box.ledger.balanced


def test_failing_query_pauses_and_others_run(caplog):
    box = StubBox().warm_up()
    box.engines["a"].faults = [RuntimeError(f"broken at 0x{number:x}") for number in range(10_000)]
    box.feed(60.0)
    assert 5 <= box.counts("a")["failed"] <= 14, "three, and one after each pause of 1, 2, 4, 8, 16 s and so on"
    assert box.counts("a")["dropped"]["paused"] > 500 and box.ledger.balanced
    assert box.counts("b")["processed"] + box.counts("c")["processed"] > 1100
    assert caplog.text.count("query a failed") == 1 and caplog.text.count("query a pauses") == 1
    assert box.executor.to_json()[0]["breaker"] in (OPEN, HALF_OPEN)


def test_recovered_query_runs_after_its_pause(caplog):
    caplog.set_level("INFO", "gemel.run")
    box = StubBox().warm_up()
    box.engines["a"].faults = [RuntimeError("broken") for _ in range(5)]
    box.feed(20.0)
    assert box.counts("a")["failed"] == 5 and box.counts("a")["processed"] > 100
    assert caplog.text.count("query a runs again") == 1 and box.executor.to_json()[0]["breaker"] == CLOSED


class StubPolicy:
    """Fails for the next `failures` decisions; else runs the query whose frame waits longest, after `delay_s`."""

    name = "stub"

    def __init__(self, delay_s: float = 0.0) -> None:
        self.failures, self.decisions, self.delay_s = 0, 0, delay_s

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return Plan(tuple(costs.queries), dict.fromkeys(costs.queries, 1), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.decisions += 1
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("in the policy")
        query = min(state.waiting, key=lambda one: state.waiting[one][0], default=None)
        if query is not None and (due := state.waiting[query][0] + self.delay_s) > state.now:
            return Decision(wake_s=due)
        return Decision(query, 1 if query else 0, policy_state="remembered")


def test_failing_policy_is_retried(caplog):
    policy = StubPolicy()
    box = StubBox(policy=policy).warm_up()
    policy.failures = MAX_POLICY_FAILURES - 1
    box.feed(30.0)
    assert box.ledger.balanced and box.counts("a")["processed"] > 50
    assert caplog.text.count("the policy stub failed: ZeroDivisionError: in the policy") == 1


def test_policy_failing_for_good_ends_the_executor():
    policy = StubPolicy()
    box = StubBox(policy=policy).warm_up()
    policy.failures, decisions, start = 10**6, policy.decisions, box.clock.now
    with pytest.raises(PolicyFailed, match="failed 10 times in a row: ZeroDivisionError: in the policy"):
        box.feed(1000.0)
    assert policy.decisions - decisions == MAX_POLICY_FAILURES and 5.0 < box.clock.now - start < 60.0
    assert box.ledger.balanced


def test_executor_sleeps_until_the_named_moment():
    policy = StubPolicy(delay_s=0.03)
    box, decisions = StubBox(policy=policy).warm_up(), policy.decisions
    assert not box.executor.step() and box.executor.sleep_s() == MAX_IDLE_S
    assert policy.decisions == decisions  # it is not asked where no frame waits
    box.put("a")
    assert not box.executor.step() and box.executor.sleep_s() == pytest.approx(0.03)
    box.clock.now += box.executor.sleep_s() + 1e-6
    assert box.executor.step() and box.counts("a")["processed"] == 1


def open_breaker() -> Breaker:
    breaker = Breaker(BackOff(1.0, 8.0), lambda: 0.0)
    for _ in range(MAX_QUERY_FAILURES):
        assert breaker.state(0.0) == CLOSED
        breaker.record_failure(0.0)
    return breaker


def test_breaker_pauses_double_up_to_the_maximum():
    breaker, now, pauses = open_breaker(), 0.0, []
    for _ in range(6):
        pauses.append(breaker.open_until - now)
        assert breaker.state(now) == breaker.state(breaker.open_until - 0.01) == OPEN
        now = breaker.open_until
        assert breaker.state(now) == HALF_OPEN
        breaker.record_failure(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_breaker_closes_after_success():
    breaker = open_breaker()
    assert breaker.record_success() and breaker.state(0.0) == CLOSED
    for _ in range(10):
        breaker.record_failure(1.0)
        assert breaker.state(1.0) == CLOSED and not breaker.record_success()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=60), st.floats(0, 0.99))
def test_breaker_pause_always_ends(events, chance):
    breaker, now = Breaker(chance=lambda: chance), 0.0
    for has_succeeded, seconds in events:
        now += seconds
        if has_succeeded:
            breaker.record_success()
        else:
            breaker.record_failure(now)
        assert breaker.state(now + 60.0) != OPEN


def watch(watchdog: Watchdog, activity: Activity | None, seconds: float, start: float = 0.0) -> str:
    """The first line of the watchdog in so many seconds of regular checks."""
    checks = (start + number * WATCH_INTERVAL_S for number in range(round(seconds / WATCH_INTERVAL_S) + 1))
    return next((line for now in checks if (line := watchdog.check(activity, now)) is not None), "")


def test_watchdog_reports_a_step_ten_times_too_long():
    short, long = Activity.expecting("query a", 0.01), Activity.expecting("query b", 2.0)
    assert short.timeout_s == MIN_HANG_S and long.timeout_s == 2.0 * HANG_FACTOR
    assert not watch(Watchdog(), short, MIN_HANG_S - 1) and not watch(Watchdog(), long, 19.0)
    assert watch(Watchdog(), short, MIN_HANG_S + 1).startswith("query a has not ended for 6")
    assert watch(Watchdog(), long, 21.0).startswith("query b has not ended for 20")


def test_watchdog_ignores_short_steps_and_a_suspended_process():
    watchdog = Watchdog()
    for second in range(100):
        assert not watch(watchdog, Activity.expecting("query a", 0.01), 0.8, second)
    assert not watch(watchdog, None, 100.0, 100.0)
    activity = Activity.expecting("query a", 0.01)
    assert not watch(watchdog, activity, 1.0, 300.0)
    assert not watch(watchdog, activity, MIN_HANG_S - 2.0 - MAX_WATCH_GAP_S, 3900.0)
    assert watch(watchdog, activity, MIN_HANG_S, 3906.0)
