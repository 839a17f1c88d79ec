"""The objective accuracy: what runs bring is what their answers are worth while they stand, and no query pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_runtime.frames.ledger import REPLACED
from edge_runtime.policies import POLICIES
from edge_runtime.policies.against import floor as floors
from edge_runtime.policies.against.floor import floor_of, reference_above
from edge_runtime.policies.against.reference import Reference
from edge_runtime.policies.against.shadow import Shadow
from edge_runtime.policies.against.virtual import VirtualBox
from edge_runtime.policies.book import Book
from edge_runtime.policies.free import freely
from edge_runtime.policies.time_sharing import TimeSharing
from edge_runtime.policies.trial import Trial
from edge_runtime.policies.worth import Standing, brought, query_shares, stood, wanted
from edge_runtime.rehearsal.simulator import simulate
from edge_runtime.schedule import Demand, Situation
from edge_runtime.schedule.costs import Costs, QueryCost

OURS, KB = POLICIES["ours"], 1000
QUICK, SLOW = (1.0, 0.4, 0.2, 0.1), (1.0, 0.99, 0.98, 0.97)


def two(run_s: float = 0.03) -> Costs:
    return Costs({query: QueryCost((query,), run_s, 0, 0.5) for query in "ab"}, {"a": 40 * KB, "b": 40 * KB}, 1e6)


def test_frames_in_time_count_one_each_and_answers_as_long_as_they_stand():
    assert brought(Demand(5.0), (0.0, 0.2), Standing(0.0, 0.0), 9.0) == 2
    aware = Demand(5.0, staleness=(1.0, 0.5))
    assert brought(aware, (0.0, 0.2), None, 9.0) == 0, "nothing stood before the first"
    assert brought(aware, (0.6,), Standing(0.0, 0.2), 0.6) == pytest.approx(0.5 * 2), "one frame old, then two"
    assert stood(aware, Standing(0.0, 0.2), 0.1) == 0


def test_what_a_virtual_box_brought_is_the_accuracy_of_its_newest_answers_over_time():
    demands = {"a": Demand(10.0, staleness=(1.0, 0.5, 0.0))}
    costs = Costs({"a": QueryCost(("a",), 0.1, 0, 1.0)}, {"a": 0}, 1e6)
    box = VirtualBox(0.0, demands=demands, resident=frozenset("a"))
    box.expect([(0.0, "a"), (0.3, "a")])
    plan = OURS.plan(costs, demands, KB)

    def first(situation):
        return plan.detail.reference.decide(situation, costs)

    while box.now < 0.5:
        box.step(0.5, costs, first)
    # At 0.1, 0.2 and 0.3 the answer is one, two and three frames old, at 0.4 the next one is one old.
    assert box.brought("a") == pytest.approx(0.5 + 0 + 0 + 0.5)
    assert box.recounted().brought("a") == 0


def test_a_newer_frame_replaces_older_ones_and_what_changes_quickly_goes_first():
    costs = two()
    demands = {"a": Demand(10.0, staleness=SLOW), "b": Demand(10.0, staleness=QUICK)}
    plan = OURS.plan(costs, demands, 100 * KB)
    box = VirtualBox(1.0, demands=demands)
    standing = dict.fromkeys("ab", Standing(0.5, 0.6))
    situation = Situation(1.0, {"a": (0.8, 0.9), "b": (0.7, 0.8, 0.9)}, frozenset("ab"), 80 * KB)
    # Both can be in time; one after the other by deadline, unless one alone can be.
    decision = freely(situation, costs, plan, Book(Shadow(box), standing=standing))
    assert decision.count == 1 and {(query, at) for query, at, reason in decision.drop if reason == REPLACED} == {
        ("a", 0.8), ("b", 0.7), ("b", 0.8),
    }  # fmt: skip
    tight = Costs({query: replace(cost, run_s=0.45) for query, cost in costs.queries.items()}, costs.tensor_bytes, 1e6)
    late = replace(situation, waiting={"a": (0.96,), "b": (0.96,)})
    assert freely(late, tight, plan, Book(Shadow(box), standing=standing)).turn == "b"


def test_a_frame_is_wanted_the_more_the_older_the_newest_answer():
    demand = Demand(10.0, staleness=QUICK)
    assert wanted(demand, Standing(0.0, 0.0), 0.1) < wanted(demand, Standing(0.0, 0.0), 0.2) < wanted(demand, None, 0.1)
    assert wanted(Demand(10.0), None, 0.1) == 1


def test_queries_count_alike_however_many_frames_they_ask_for():
    shares = query_shares({"a": Demand(2.0, staleness=QUICK), "b": Demand(6.0, staleness=QUICK)})
    assert shares["a"] * 2.0 == shares["b"] * 6.0
    assert query_shares({"a": Demand(2.0), "b": Demand(6.0)}) == {"a": 1, "b": 1}


def test_the_floor_is_what_time_sharing_brings_with_nothing_shared():
    queries = {query: QueryCost(("both",), 0.03, 0, 0.5) for query in "ab"}
    costs = Costs(queries, {"both": 100 * KB}, 1e6)
    frames, aware = dict.fromkeys("ab", Demand(10.0)), dict.fromkeys("ab", Demand(10.0, staleness=QUICK))
    assert floor_of(costs, frames, 100 * KB) == {}
    tight, roomy = floor_of(costs, aware, 101 * KB), floor_of(costs, aware, 202 * KB)
    assert all(0 < tight[query] < roomy[query] < 10 for query in "ab"), "apart, they swap where one copy has room"


@pytest.mark.parametrize(
    ("floor", "bears"), [({}, False), ({"b": 10.0}, False), ({"b": 5.0}, True), ({"b": 0.0}, True)]
)
def test_the_free_choice_may_take_a_query_down_to_its_floor_and_no_further(floor, bears):
    costs, demands = two(), dict.fromkeys("ab", Demand(10.0, staleness=QUICK))
    plan = OURS.plan(costs, demands, 100 * KB)
    plan = replace(plan, detail=replace(plan.detail, floor=floor))
    situation = Situation(0.0, dict.fromkeys("ab", (0.0,)), frozenset(), 0)
    book = Book(Shadow(VirtualBox(0.0, demands=demands))).seen(situation, costs, plan.detail.reference)
    trial = Trial(situation, book, costs, plan)
    trial.of_paper = {"a": 100.0, "b": 100.0}
    served = {"a": 1000.0, "b": 1000.0}
    assert trial.bears(Book(Shadow(VirtualBox(0.0, served=served)), {"a": 1200.0, "b": 900.0})) is bears


def test_ours_brings_at_least_the_accuracy_of_the_papers_schedule_where_it_aims_at_it():
    costs = Costs({query: QueryCost((query,), 0.02, 0, 0.3) for query in "abc"}, dict.fromkeys("abc", 60 * KB), 1e6)
    demands = {
        "a": Demand(20.0, staleness=SLOW),
        "b": Demand(20.0, staleness=QUICK),
        "c": Demand(20.0, staleness=QUICK),
    }
    frames = {query: [place / 70 + index / 20 for index in range(600)] for place, query in enumerate("abc")}
    had = {}
    for name in ("gemel", "ours"):
        played = simulate(costs, frames, 130 * KB, POLICIES[name], demands)
        standing: dict[str, Standing] = {}
        had[name] = 0.0
        for frame in sorted((one for one in played.frames if one.finished_at), key=lambda one: one.finished_at or 0):
            assert frame.finished_at is not None
            had[name] += stood(demands[frame.query], standing.get(frame.query), frame.finished_at)
            standing[frame.query] = Standing(frame.captured_at, frame.finished_at)
    assert had["ours"] >= 0.99 * had["gemel"]


def test_turns_as_listed_are_followed_where_those_of_sharing_leave_a_query_below_the_floor(monkeypatch):
    costs, demands = two(), dict.fromkeys("ab", Demand(10.0, staleness=QUICK))
    listed = POLICIES["time-sharing"].plan(costs, demands, 101 * KB)
    monkeypatch.setattr(
        floors,
        "rehearsed",
        lambda _policy, _costs, plan, _demands: {"a": 1.0, "b": 1.0 if plan.order[0] == "b" else 0.5},
    )
    monkeypatch.setattr(TimeSharing, "plan", lambda *_: replace(listed, order=("b", "a")))

    def chosen(floor: dict[str, float]) -> Reference:
        return reference_above(floor, costs, demands, 101 * KB)

    assert chosen({"a": 1.0, "b": 1.0}).plan.order == ("b", "a")
    assert chosen({"a": 1.0, "b": 0.5}).plan.order == ("b", "a"), "more in sum"
    assert chosen({}).plan.order == ("a", "b"), "the paper's own, where frames are aimed at"
    assert chosen({"a": 2.0, "b": 0.5}).policy.name == "as-originals", "where neither will do"
