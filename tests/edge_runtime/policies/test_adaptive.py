"""What makes `adaptive` bring no fewer frames than the paper's schedule: trials, the book, and the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_runtime.policies import POLICIES
from edge_runtime.policies.adaptive import Course
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.choice import Choice
from edge_runtime.policies.following import rejoined, unseen
from edge_runtime.policies.gemel import TurnHistory
from edge_runtime.policies.trial import Trial
from edge_runtime.policies.trying import HORIZON_S, LEAD_S, changed
from edge_runtime.queues import DEPTH
from edge_runtime.scheduler import Decision, Plan, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import Costs, QueryCost
from edge_runtime.simulation.simulator import simulate

OURS = POLICIES["adaptive"]


def swapping() -> Costs:
    """Loads of 80 ms, runs of 5 ms: the free choice stays with one where the paper's schedule swaps."""
    return Costs({query: QueryCost((query,), 0.005, 0, 0.2) for query in "ab"}, {"a": 80_000, "b": 80_000}, 1e6)


def begun(costs: Costs, fps: float = 20.0) -> tuple[Plan, SchedulerState, Book]:
    plan = OURS.plan(costs, dict.fromkeys(costs.queries, QuerySpec(fps)), 100_000)
    waiting = dict.fromkeys(costs.queries, (0.0,))
    state = SchedulerState(0.0, waiting, frozenset(), 0)
    book = Book(Shadow(VirtualBox(0.0)))
    return plan, state, book.seen(state, costs, plan.detail.reference)


def test_a_trial_says_the_same_however_it_is_asked_and_what_the_paper_brings_meanwhile():
    costs = swapping()
    plan, state, book = begun(costs)
    trial, at_once = Trial(state, book, costs, plan), Trial(state, book, costs, plan)
    answers = [trial.passed(steps) for steps in range(8, 4000, 8)]
    assert answers[0] is None and answers[-1] is True and at_once.passed(4000) is True
    first = answers.index(True)
    assert [trial.passed(steps) for steps in range(8, 4000, 8)] == answers and None not in answers[first:]
    assert trial.of_paper == at_once.of_paper and sum(trial.of_paper.values()) > 20


def test_a_free_choice_that_brings_no_more_does_not_pass():
    costs = Costs({"a": QueryCost(("a",), 0.005, 0, 0.2)}, {"a": 80_000}, 1e6)
    plan, state, book = begun(costs)
    assert Trial(state, book, costs, plan).passed(4000) is False


def test_a_free_choice_that_the_book_would_end_on_the_way_does_not_pass(monkeypatch: pytest.MonkeyPatch):
    costs, bears = swapping(), Trial.bears
    plan, state, book = begun(costs)
    monkeypatch.setattr(Trial, "bears", lambda trial, seen: bears(trial, seen) and seen.of("a") < 40)
    trial = Trial(state, book, costs, plan)
    assert trial.passed(4000) is False and sum(trial.of_paper.values()) > 20
    monkeypatch.setattr(Trial, "bears", bears)
    assert Trial(state, book, costs, plan).passed(4000) is True


def test_the_free_choice_begins_where_its_trial_began_it_and_brings_more_as_that_said():
    costs, free = swapping(), []

    class Watched:
        name, view, plan = OURS.name, OURS.view, OURS.plan

        def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
            decision = OURS.decide(state, costs, plan)
            if (passed := decision.policy_state.passed) is not None:
                free.append((passed, state.now, decision.count))
            return decision

    arrivals = {query: [(index + phase) / 20 for index in range(400)] for query, phase in (("a", 0.1), ("b", 0.6))}
    simulate(costs, arrivals, 100_000, Watched(), dict.fromkeys(costs.queries, QuerySpec(20.0)))
    trial, began = free[0][:2]
    assert began == pytest.approx(trial.begins) and began > LEAD_S
    ran = sum(count for one, now, count in free if one is trial and now < began + HORIZON_S)
    assert ran > sum(trial.of_paper.values())


def test_a_free_choice_may_be_behind_by_what_it_catches_up_with_and_no_more():
    costs = swapping()
    plan, state, book = begun(costs)
    trial = Trial(state, book, costs, plan)
    trial.passed(4000)
    trial.of_paper = {"a": 100, "b": 10}

    def at(served: dict[str, int], ran: dict[str, int]) -> bool:
        return trial.bears(Book(Shadow(VirtualBox(0.0, served=served)), ran))

    assert at({"a": 100, "b": 10}, {"a": 140, "b": 6}) and not at({"a": 100, "b": 10}, {"a": 140, "b": 5})
    assert at({"a": 400, "b": 1}, {"a": 395, "b": 1}) and not at({"a": 400, "b": 1}, {"a": 393, "b": 1})


def test_ours_begins_with_the_papers_decisions_and_goes_back_to_them_when_it_falls_behind():
    costs = swapping()
    plan, state, _ = begun(costs)
    first = OURS.decide(state, costs, plan)
    paper = POLICIES["gemel"].decide(state, costs, plan.detail.reference.plan)
    assert (first.query, first.count, first.load) == (paper.query, paper.count, paper.load)
    course: Course = first.policy_state
    trial = Trial(state, course.book, costs, plan)
    trial.passed(4000)
    behind = replace(course.book, shadow=Shadow(VirtualBox(5.0, served={"a": 90, "b": 90})), ran={"a": 90, "b": 0})
    later = SchedulerState(5.0, {"a": (4.99,)}, frozenset("a"), 80_384, replace(course, passed=trial, book=behind))
    after: Course = OURS.decide(later, costs, plan).policy_state
    assert after.passed is None and after.rejoin_by is not None and after.try_at > 5.0


def test_the_way_back_loads_what_the_shadow_has_loaded_and_waits_for_it():
    costs = swapping()
    shadow = Shadow(VirtualBox(1.0, TurnHistory(("b", "a")), frozenset("b"), 80_384, {"a": (0.95,)}))
    away = SchedulerState(0.9, {"a": (0.85, 0.95)}, frozenset("a"), 80_384)
    step = rejoined(away, costs, shadow)
    assert step is not None and (step.query, step.count, step.load, step.evict) == ("b", 0, ("b",), ("a",))
    there = replace(away, resident=frozenset("b"), now=0.98)
    step = rejoined(there, costs, shadow)
    assert step is not None and (step.query, step.wake_s) == (None, 1.0)
    assert rejoined(replace(there, now=1.0), costs, shadow) is None
    left, drop = unseen(away, shadow)
    assert left.waiting == {"a": (0.95,)} and [one[:2] for one in drop] == [("a", 0.85)]


def test_costs_that_drift_call_for_another_trial():
    costs = swapping()
    assert not changed(costs, costs.with_query("a", costs.queries["a"].slowed(1.2)))
    assert changed(costs, costs.with_query("a", costs.queries["a"].slowed(1.3)))
    assert changed(costs, costs.with_measured("a", 0.005, 0.7e6))


@pytest.mark.parametrize("fps", [30.0, 1.0])
def test_a_frame_that_the_next_one_would_push_out_is_as_urgent_as_one_whose_deadline_is_near(fps):
    costs = Costs({"a": QueryCost(("a",), 0.01, 0, 20.0)}, {"a": 512}, 1e6)
    plan = OURS.plan(costs, {"a": QuerySpec(fps)}, 4096)
    captured = tuple(index / fps for index in range(DEPTH))
    state = SchedulerState(captured[-1], {"a": captured}, frozenset("a"), 512)
    (job,) = Choice(state, state.waiting, costs, plan, Book(Shadow(VirtualBox(0.0)))).jobs()
    assert job.deadline == pytest.approx(captured[-1] + 1 / fps + 0.01)


def test_what_was_in_time_by_the_paper_stays_so_where_nothing_more_can_be_had():
    costs, arrivals = swapping(), {"a": [index / 20 for index in range(200)]}
    both = [
        simulate(costs, arrivals, 100_000, POLICIES[name]).per_query()[0]["processed"] for name in ("gemel", "adaptive")
    ]
    assert both[0] == both[1] > 190


def test_costs_that_have_changed_call_for_another_trial_but_not_at_every_decision():
    costs = swapping()
    plan, state, book = begun(costs)
    passed = Trial(state, book, costs, plan)
    passed.passed(4000)
    slower = costs.with_query("a", costs.queries["a"].slowed(1.5))
    course: Course = OURS.decide(state, costs, plan).policy_state
    for try_at, trial in ((20.0, False), (0.0, True)):
        policy_state = replace(course, passed=passed, try_at=try_at)
        after = OURS.decide(replace(state, policy_state=policy_state), slower, plan).policy_state
        assert (after.trial is not None) is trial and after.passed is passed


@pytest.mark.parametrize(("since_s", "waits", "lost"), [(1.0, DEPTH, 9), (1.0, DEPTH - 1, 0), (20.0, DEPTH, 0)])
def test_the_shadow_is_given_the_frames_that_were_pushed_out_while_the_box_was_busy(since_s, waits, lost):
    box, demands = VirtualBox(0.0), {"a": QuerySpec(10.0)}
    newest = box.told({"a": (0.0,)}, {}, demands)
    captured = tuple(since_s + place / 10 for place in range(waits))
    assert box.told({"a": captured}, newest, demands) == {"a": captured[-1]}
    assert [at for at, _ in box.coming] == pytest.approx([place / 10 for place in range(lost + 1)] + [*captured])
    assert box.told({"a": captured[1:]}, {"a": captured[-1]}, demands) == {"a": captured[-1]}
    assert len(box.coming) == 1 + lost + waits
