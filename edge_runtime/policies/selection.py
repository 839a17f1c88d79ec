"""Which scheduler runs: `gemel` or the greedy one, by simulating both on the workload's own rates and measured costs.

The box begins with `gemel`, whose frames in time are the floor of each query; where accuracy is the objective, with
the greedy scheduler. As soon as every query was heard of, and again whenever a measured cost drifts by a quarter
or other queries receive frames, both are simulated from the box's own state on the frames that are expected, and the
better one runs from then on. A greedy candidate that gives a query clearly less than `gemel` does is not taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.policies.adaptive import AdaptivePolicy, RunHistory, UtilityConfig, UtilityPlan
from edge_runtime.policies.gemel import GemelPolicy
from edge_runtime.scheduler.costs import Costs
from edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, QuerySpec, SchedulerState, mean_accuracy
from edge_runtime.simulation.simulator import BoxObserver, VirtualBox

GEMEL, GREEDY = GemelPolicy(), AdaptivePolicy()


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """When and how the schedulers are compared. Times in seconds.

    The first comparison waits until every query should have been heard of once, between `min_settle_s` and
    `max_settle_s`. What is compared begins `lead_s` after the comparison starts, so that it is over by then, and is
    simulated for `horizon_s`; `steps` simulated decisions are played beside every real one, fewer where a box has more
    than `many_queries`. After a comparison the next comes `again_s` later at the soonest, twice as long each time up to
    `max_again_s`, and only if a run time or the copy rate drifted by `drift_share`, or the set of queries that receive
    frames changed. A query without a frame for `silent_periods` receives none. No query may have less than
    `query_share` of its frames under `gemel`, less `query_slack` frames; where accuracy is the objective, no less than
    `accuracy_slack` below it.
    """

    min_settle_s: float = 1.0
    max_settle_s: float = 10.0
    lead_s: float = 6.0
    horizon_s: float = 30.0
    steps: int = 16
    many_queries: int = 15
    again_s: float = 20.0
    max_again_s: float = 300.0
    drift_share: float = 0.25
    silent_periods: float = 3.0
    query_share: float = 0.88
    query_slack: float = 1.0
    accuracy_slack: float = 0.05
    candidates: tuple[UtilityConfig, ...] = (UtilityConfig(), UtilityConfig(floor_share=0.0))


CONFIG = SelectionConfig()


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    """The plans of both schedulers."""

    gemel: Plan
    greedy: Plan
    specs: Mapping[str, QuerySpec]

    @property
    def for_accuracy(self) -> bool:
        """Whether the objective is accuracy over time."""
        return self.greedy.data.for_accuracy

    def greedy_plan(self, chosen: UtilityPlan) -> Plan:
        """The greedy scheduler's plan with the weights of a candidate, for the present budget."""
        return replace(self.greedy, data=replace(chosen, infeasible=self.greedy.data.infeasible))

    def begin(self, now: float) -> SelectionState:
        """The state of a box that begins now: `gemel` runs, or the greedy scheduler where accuracy is the objective."""
        chosen = self.greedy.data if self.for_accuracy else None
        return SelectionState(RunHistory(now), first_comparison(now, self.specs), chosen=chosen)


@dataclass(frozen=True, slots=True)
class SelectionState:
    """What is remembered: the history of runs, which scheduler runs, and the comparison under way.

    The greedy scheduler runs with the weights in `chosen`; None for `gemel`, which remembers `turns`. `compared`
    are the costs and the queries of the last comparison.
    """

    history: RunHistory
    compare_at: float
    again_s: float = CONFIG.again_s
    turns: Any = None
    chosen: UtilityPlan | None = None
    comparison: Comparison | None = None
    steps: int = 0
    compared: tuple[Costs, frozenset[str]] | None = None


class SelectingPolicy:
    """`adaptive`: `gemel` or the greedy scheduler, whichever a simulation shows to be better."""

    name = "adaptive"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        gemel, greedy = (policy.plan(costs, specs, budget_bytes) for policy in (GEMEL, GREEDY))
        return replace(greedy, data=SelectionPlan(gemel, greedy, specs))

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        memory: SelectionState = state.policy_state or plan.data.begin(state.now)
        memory = replace(memory, history=memory.history.with_waiting(state.waiting))
        memory = advance_selection(memory, state, costs, plan.data)
        if memory.chosen is not None:
            decision = GREEDY.decide(
                replace(state, policy_state=memory.history), costs, plan.data.greedy_plan(memory.chosen)
            )
            return replace(decision, policy_state=replace(memory, history=decision.policy_state))
        decision = GEMEL.decide(replace(state, policy_state=memory.turns), costs, plan.data.gemel)
        history = with_decision(memory.history, state, decision)
        return replace(decision, policy_state=replace(memory, history=history, turns=decision.policy_state))


def first_comparison(now: float, specs: Mapping[str, QuerySpec]) -> float:
    """When every query of a box that begins now should have been heard of."""
    longest_s = max(1 / spec.fps for spec in specs.values())
    return now + min(CONFIG.max_settle_s, max(CONFIG.min_settle_s, longest_s))


def with_decision(history: RunHistory, state: SchedulerState, decision: Decision) -> RunHistory:
    """The history once a decision has been carried out."""
    if decision.query is None or not decision.count:
        return history
    dropped = {captured_at for query, captured_at, _ in decision.drop if query == decision.query}
    left = [captured_at for captured_at in state.waiting[decision.query] if captured_at not in dropped]
    return history.with_run(decision.query, left[: decision.count])


def advance_selection(
    memory: SelectionState, state: SchedulerState, costs: Costs, data: SelectionPlan
) -> SelectionState:
    """The state once a comparison that is due has begun, or the one under way was played a little further."""
    now = state.now
    if memory.comparison is None:
        if now < memory.compare_at or not state.waiting or not has_drifted(memory, now, costs, data.specs):
            return memory
        return replace(memory, comparison=Comparison(state, costs, data, memory), steps=0)
    per_decision = max(1, CONFIG.steps * CONFIG.many_queries // max(CONFIG.many_queries, len(data.specs)))
    steps = memory.steps + per_decision
    comparison = memory.comparison
    if not comparison.finish_within(steps) or now < comparison.begins - CLOCK_SLACK_S:
        return replace(memory, steps=steps)
    history = replace(memory.history, since=now, ran={})
    return replace(
        memory, history=history, chosen=comparison.winner, comparison=None, compare_at=now + memory.again_s,
        again_s=min(CONFIG.max_again_s, 2 * memory.again_s), compared=(comparison.costs, comparison.active),
        turns=memory.turns if memory.chosen is None else None,
    )  # fmt: skip


def has_drifted(memory: SelectionState, now: float, costs: Costs, specs: Mapping[str, QuerySpec]) -> bool:
    """Whether the last comparison says nothing any more."""
    if memory.compared is None:
        return True
    before, active = memory.compared
    if active != active_queries(memory.history, now, specs):
        return True
    if before is costs:
        return False
    pairs = [(before.copy_bytes_per_s, costs.copy_bytes_per_s)]
    pairs += [(cost.run_s, costs.queries[query].run_s) for query, cost in before.queries.items()]
    return any(abs(new - old) > CONFIG.drift_share * old for old, new in pairs)


def active_queries(history: RunHistory, now: float, specs: Mapping[str, QuerySpec]) -> frozenset[str]:
    """The queries that received a frame of late."""
    return frozenset(
        query for query, newest in history.newest.items() if now - newest <= CONFIG.silent_periods / specs[query].fps
    )


class Comparison:
    """`gemel` and the greedy candidates, simulated from a box's state on the expected frames.

    Whatever runs on the box goes on for `lead_s`; from then on, `begins`, each candidate goes its own way. It is played
    as far as it was ever called for, and gives the same answer whenever it is called with as many steps. `winner` holds
    the weights of the greedy scheduler, None for `gemel`.
    """

    def __init__(self, state: SchedulerState, costs: Costs, data: SelectionPlan, memory: SelectionState) -> None:
        self.costs, self._data, self._memory = costs, data, memory
        self.active = active_queries(memory.history, state.now, data.specs)
        self.begins = state.now + CONFIG.lead_s
        self._ends = self.begins + CONFIG.horizon_s
        self._urgency = {query: state.urgency.get(query, spec.urgency) for query, spec in data.specs.items()}
        self.winner: UtilityPlan | None = None
        self._steps, self._steps_needed = 0, None
        feed = expected_frames(memory.history, self.active, data.specs, state.now, self._ends)
        self._moments: dict[str, list[float]] = {query: [] for query in self.active}
        for at, query, _ in feed:
            if at > self.begins:
                self._moments[query].append(at)
        self._box = VirtualBox(
            costs, self._decide_as_now, BoxObserver(), feed, state.now, frozenset(state.resident), state.resident_bytes,
            memory, state.urgency, waiting=dict(state.waiting),  # type: ignore[arg-type]
        )  # fmt: skip
        self._play = self._rounds()

    def finish_within(self, steps: int) -> bool:
        """Whether the winner is known within so many simulated decisions in all."""
        while self._steps_needed is None and self._steps < steps:
            self._steps += 1
            if next(self._play, "over") == "over":
                self._steps_needed = self._steps
        return self._steps_needed is not None and self._steps_needed <= steps

    def _decide_as_now(self, state: SchedulerState) -> Decision:
        """What the box decides at present, without comparisons."""
        memory: SelectionState = state.policy_state
        memory = replace(memory, compare_at=float("inf"))
        return SELECTING.decide(replace(state, policy_state=memory), self.costs, Plan((), {}, 0, self._data))

    def _rounds(self):
        """Play everything, a decision at a time, and name the winner."""
        yield from self._run(self._box, self.begins)
        memory: SelectionState = self._box.policy_state
        start = replace(memory.history, since=self._box.now, ran={})
        gemel = SimulatedRuns(start)
        turns = memory.turns if memory.chosen is None else None
        box = self._box.fork(lambda state: GEMEL.decide(state, self.costs, self._data.gemel), gemel, turns)
        yield from self._run(box, self._ends)
        rates = {query: len(gemel.captured.get(query, ())) / CONFIG.horizon_s for query in self._data.specs}
        most = self._score(gemel)
        for config in CONFIG.candidates:
            weights = replace(self._data.greedy.data, config=config, floor_rates=rates)
            plan = replace(self._data.greedy, data=weights)
            greedy = SimulatedRuns(start)
            box = self._box.fork(lambda state, plan=plan: GREEDY.decide(state, self.costs, plan), greedy, start)
            yield from self._run(box, self._ends)
            score = self._score(greedy)
            if score > most and self._keeps_floors(greedy, gemel):
                self.winner, most = weights, score

    def _run(self, box: VirtualBox, until_s: float):
        while box.now < until_s and box.step(until_s):
            yield None

    def _score(self, outcome: SimulatedRuns) -> float:
        return sum(self._urgency[query] * value for query, value in self._values(outcome).items())

    def _values(self, outcome: SimulatedRuns) -> dict[str, float]:
        """Of each query its frames in time, or its accuracy over time."""
        if not self._data.for_accuracy:
            return {query: float(len(outcome.captured.get(query, ()))) for query in self.active}
        return {query: outcome.accuracy(query, self._data.specs[query], self._moments[query]) for query in self.active}

    def _keeps_floors(self, greedy: SimulatedRuns, gemel: SimulatedRuns) -> bool:
        mine, theirs = self._values(greedy), self._values(gemel)
        if self._data.for_accuracy:
            return all(mine[query] >= value - CONFIG.accuracy_slack for query, value in theirs.items())
        return all(mine[query] >= CONFIG.query_share * value - CONFIG.query_slack for query, value in theirs.items())


class SimulatedRuns(BoxObserver):
    """The results of one simulated scheduler: when the frames of each query were captured, and when they finished."""

    def __init__(self, start: RunHistory) -> None:
        self.captured: dict[str, list[float]] = {}
        self.finished: dict[str, list[float]] = {}
        self._start = start

    def on_run(self, query: str, captured: Sequence[float], started_at: float, finished_at: float) -> None:
        self.captured.setdefault(query, []).extend(captured)
        self.finished.setdefault(query, []).extend([finished_at] * len(captured))

    def accuracy(self, query: str, spec: QuerySpec, moments: Sequence[float]) -> float:
        """The mean accuracy over time at these moments."""
        answers = list(zip(self.finished.get(query, ()), self.captured.get(query, ()), strict=True))
        if query in self._start.answered:
            answers.insert(0, (self._start.since, self._start.answered[query]))
        return mean_accuracy(spec.staleness or (1.0, 0.0), spec.fps, moments, answers)


def expected_frames(
    history: RunHistory, active: frozenset[str], specs: Mapping[str, QuerySpec], now: float, ends: float
) -> list[tuple[float, str, float]]:
    """The frames that come after `now` and before `ends`, each query's at its rate from its newest one on."""
    frames = []
    for query in active:
        newest, fps = history.newest[query], specs[query].fps
        times = (newest + index / fps for index in range(1, int((ends - newest) * fps) + 1))
        frames += [(at, query, at) for at in times if now < at < ends]
    return sorted(frames)


SELECTING = SelectingPolicy()
