"""The paper's turns where they bring more accuracy over time, for as long as no query has less than its original."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edge_runtime.policies import POLICIES
from edge_runtime.policies.accuracy.accurate import LOST_S, Course
from edge_runtime.policies.accuracy.contest import Contest
from edge_runtime.policies.gemel import TurnHistory
from edge_runtime.policies.trying import HORIZON_S, LEAD_S
from edge_runtime.scheduler import Decision, SchedulerState
from edge_runtime.scheduler.costs import memory_settings
from edge_runtime.scheduler.types import mean_accuracy
from edge_runtime.simulation.simulator import simulate
from tests.edge_runtime.policies.test_accurate import DEMANDS, KB, OURS, answers, drawn, two

FIRST_TRIAL = "edge_runtime.policies.accuracy.accurate.first_trial"
SECONDS = 40


def accuracy(seed: int, policy: str, setting: str) -> dict[str, float]:
    """Each query's accuracy over time on a workload drawn at random."""
    costs, demands, begun = drawn(seed)
    frames = {
        query: [captured[0] + place / demands[query].fps for place in range(int(SECONDS * demands[query].fps))]
        for query, captured in begun.items()
    }
    budget = memory_settings(POLICIES["time-sharing"].view(costs))[setting]
    played = answers(simulate(costs, frames, budget, POLICIES[policy], demands))
    return {
        query: mean_accuracy(
            demand.staleness,
            demand.fps,
            frames[query],
            [(at, captured) for at, name, captured in played if name == query],
        )
        for query, demand in demands.items()
    }


@pytest.mark.parametrize("setting", ["min", "50%", "75%"])
def test_turns_bring_more_where_they_are_taken_and_no_query_less_than_its_original(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gained = []
    for seed in range(100, 112):
        ours, originals = accuracy(seed, "adaptive", setting), accuracy(seed, "time-sharing", setting)
        assert all(ours[query] >= originals[query] - 0.005 for query in ours), f"workload {seed}"
        with monkeypatch.context() as never:
            never.setattr(FIRST_TRIAL, lambda *_: math.inf)
            owed = accuracy(seed, "adaptive", setting)
        gained.append((sum(ours.values()) - sum(owed.values())) / len(ours))
    assert min(gained) > -0.01 and max(gained) > 0.01


class Won:
    """A contest that is over, and won, or not."""

    def __init__(self, begins: float, costs: object, won: bool = True) -> None:
        self.begins, self.costs, self._won = begins, costs, won

    def passed(self, _steps: int) -> bool:
        return self._won


def following(now: float, contest: Won, **kept: object) -> Course:
    """The course of a box that takes the paper's turns."""
    begun = OURS.decide(SchedulerState(now, {"a": (now,)}, frozenset(), 0), two(), OURS.plan(two(), DEMANDS, 100 * KB))
    account = replace(begun.policy_state.account, answered={"a": now, "b": now})
    return replace(begun.policy_state, account=account, passed=contest, seen_at=now, **kept)


def decision(course: Course, now: float) -> Decision:
    return OURS.decide(
        SchedulerState(now, {"a": (now - 0.01,), "b": (now - 0.01,)}, frozenset("ab"), 80 * KB, course),
        two(), OURS.plan(two(), DEMANDS, 100 * KB),
    )  # fmt: skip


def test_turns_are_taken_from_when_the_contest_is_won_and_has_begun() -> None:
    begun = following(1.0, Won(1.0, two()))
    waits = replace(begun, passed=None, contest=Won(1.2, two()))
    assert decision(waits, 1.1).policy_state.passed is None
    taken = decision(waits, 1.3)
    assert taken.policy_state.passed is waits.contest and isinstance(taken.policy_state.turns, TurnHistory)
    assert taken.policy_state.turns.recent == (taken.query,)
    assert taken.policy_state.account.answered[taken.query] == pytest.approx(1.29)


def test_who_loses_ends_the_turns_and_so_do_other_costs() -> None:
    contest = Won(1.0, two())
    assert decision(following(1.0, contest, lost={"a": 0.9 * LOST_S}), 1.1).policy_state.passed is contest
    after = decision(following(1.0, contest, lost={"a": 1.1 * LOST_S}), 1.1).policy_state
    assert after.passed is None and after.turns is None and after.try_at > 30
    never = following(1.0, contest)
    starved = replace(never, account=replace(never.account, answered={}))
    assert decision(starved, 1.1).policy_state.passed is None, (
        "an original has an answer, or is at one, and it has none"
    )
    slower = Won(1.0, two(run_s=0.1))
    again = decision(following(1.0, slower), 1.1).policy_state
    assert again.passed is None and again.try_at == 1.1


def test_who_lost_has_another_contest_once_that_is_made_up_and_one_that_is_lost_is_waited_for() -> None:
    owing = replace(following(1.0, Won(1.0, two())), passed=None, owes=True, try_at=90.0, lost={"a": 0.05})
    assert decision(owing, 1.1).policy_state.contest is None
    begun = decision(replace(owing, lost={"a": -0.01}), 1.1).policy_state
    assert isinstance(begun.contest, Contest)
    failed = decision(replace(begun, contest=Won(1.0, two(), won=False)), 1.2).policy_state
    assert failed.contest is None and not failed.owes and failed.try_at > 20
    assert decision(failed, 1.3).policy_state.contest is None


def test_what_is_lost_is_what_the_original_knows_better_in_accuracy_times_seconds() -> None:
    course = following(1.0, Won(1.0, two()), there={"b": 1.0})
    old = replace(course, account=replace(course.account, answered={"a": 1.0, "b": 0.7}))
    lost = decision(old, 1.2).policy_state.lost
    assert lost["b"] == pytest.approx(0.2 * (0.2 - 0.1)), "two and five frames old, of those that fall quickly"


def test_a_contest_is_played_as_far_as_it_is_asked_for_and_says_the_same_again() -> None:
    costs, plan = two(), OURS.plan(two(), DEMANDS, 60 * KB)
    state = SchedulerState(1.0, {"a": (1.0,), "b": (1.0,)}, frozenset(), 0)
    account = OURS.decide(state, costs, plan).policy_state.account
    contest = Contest(state, account, costs, plan)
    assert contest.begins == 1.0 + LEAD_S and contest.passed(10) is None
    steps = 10
    while (won := contest.passed(steps)) is None:
        steps += 10
    assert HORIZON_S < steps / 10 < 200 and contest.passed(steps + 1000) is won and contest.passed(10) is None
