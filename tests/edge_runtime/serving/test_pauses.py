"""Lasting failures in the executor: queries pause, and a policy is called again after a pause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edge_runtime.executor import MAX_IDLE_S, MAX_POLICY_FAILURES, Executor, PolicyFailed
from edge_runtime.queues import Frame
from edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs
from tests.edge_runtime.serving.test_faults import IMAGE, NEEDS, Box


def warm(**parts: Any) -> Box:
    box = Box()
    if parts:
        old = box.executor
        given = {"device": old.device, "policy": old.policy, "specs": old._specs, "mailboxes": old.mailboxes}
        box.executor = Executor(publisher=old.publisher, clock=old.clock, **{**given, **parts})
    box.executor.warm_up(dict.fromkeys(NEEDS, IMAGE))
    return box


def feed(box: Box, seconds: float) -> None:
    """A frame of every query each 0.1 s, and steps until there is nothing to do."""
    ends = box.clock.now + seconds
    while box.clock.now < ends:
        arrived = box.clock.now
        box.put(*NEEDS)
        while box.executor.step():
            pass
        box.clock.now = max(box.clock.now, arrived + 0.1)


def account(box: Box, query: str) -> dict[str, Any]:
    return next(row for row in box.ledger.to_json() if row["query"] == query)


def test_failing_query_pauses_and_others_run(caplog):
    box = warm()
    box.engines["a"].faults = [RuntimeError(f"broken at 0x{number:x}") for number in range(10_000)]
    feed(box, 60.0)
    tried = account(box, "a")["failed"]
    assert 5 <= tried <= 14, "three, and one after each pause of 1, 2, 4, 8, 16 s and so on"
    assert account(box, "a")["dropped"]["paused"] > 500 and box.ledger.balanced
    assert account(box, "b")["processed"] + account(box, "c")["processed"] > 1100
    assert caplog.text.count("query a failed") == 1 and caplog.text.count("query a pauses") == 1
    assert box.executor.to_json()[0]["breaker"] in ("open", "half-open")


def test_recovered_query_runs_after_its_pause(caplog):
    caplog.set_level("INFO", "gemel.run")
    box = warm()
    box.engines["a"].faults = [RuntimeError("broken") for _ in range(5)]
    feed(box, 20.0)
    assert account(box, "a")["failed"] == 5 and account(box, "a")["processed"] > 100
    assert caplog.text.count("query a runs again") == 1 and box.executor.to_json()[0]["breaker"] == "closed"


class Raising:
    """A policy that raises for as long as `raises` says, and otherwise runs the query that waits longest."""

    name = "raising"

    def __init__(self) -> None:
        self.raises, self.asked = 0, 0

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        return Plan(tuple(costs.queries), dict.fromkeys(costs.queries, 1), budget_bytes)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.asked += 1
        if self.raises:
            self.raises -= 1
            raise ZeroDivisionError("in the policy")
        query = min(state.waiting, key=lambda one: state.waiting[one][0], default=None)
        return Decision(query, 1 if query else 0, policy_state="remembered")


def test_failing_policy_is_retried(caplog):
    policy = Raising()
    box = warm(policy=policy)
    policy.raises = MAX_POLICY_FAILURES - 1
    feed(box, 30.0)
    assert box.ledger.balanced and account(box, "a")["processed"] > 50
    assert caplog.text.count("the policy raising failed: ZeroDivisionError: in the policy") == 1


def test_policy_failing_for_good_ends_the_executor():
    policy = Raising()
    box = warm(policy=policy)
    policy.raises, asked = 10**6, policy.asked
    began = box.clock.now
    with pytest.raises(PolicyFailed, match="failed 10 times in a row: ZeroDivisionError: in the policy"):
        feed(box, 1000.0)
    assert policy.asked - asked == MAX_POLICY_FAILURES and 5.0 < box.clock.now - began < 60.0
    assert box.ledger.balanced


class Waking(Raising):
    """Waits with every frame until a second after it was captured."""

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        self.asked += 1
        due = [captured[0] + 0.03 for captured in state.waiting.values()]
        return Decision(wake_s=min(due)) if due and min(due) > state.now else super().decide(state, costs, plan)


def test_paused_policy_is_not_called_early():
    policy = Waking()
    box = warm(policy=policy)
    assert not box.executor.step() and box.executor.sleep_s() == MAX_IDLE_S
    box.executor.mailboxes.put("a", Frame(0, box.clock.now, 0.0, IMAGE))
    assert not box.executor.step()
    assert box.executor.sleep_s() == pytest.approx(0.03)
    box.clock.now += box.executor.sleep_s() + 1e-6
    assert box.executor.step() and account(box, "a")["processed"] == 1
