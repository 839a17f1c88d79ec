"""Which scheduler runs: `gemel` or the greedy one, by simulating both on the workload's own rates and measured costs.

The box begins with `gemel`, whose frames in time are the floor of each query; where accuracy is the objective, with
the greedy scheduler. As soon as every query was heard of, and again whenever a measured cost drifts by a quarter
or other queries receive frames, both are simulated from the box's own state on the frames that are expected, and the
better one runs from then on. The greedy scheduler is not taken where it gives a query clearly less than `gemel` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemel.edge_runtime.policies.adaptive import AdaptivePolicy, RunHistory
from gemel.edge_runtime.policies.gemel import GemelPolicy
from gemel.edge_runtime.scheduler.costs import Costs
from gemel.edge_runtime.scheduler.joint import wait_for_pass, waiting_after_drops
from gemel.edge_runtime.scheduler.types import Decision, Plan, Policy, QuerySpec, SchedulerState, mean_accuracy
from gemel.edge_runtime.simulation.simulator import BoxObserver, VirtualBox

GEMEL, GREEDY = GemelPolicy(), AdaptivePolicy()


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """When and how the schedulers are compared. Times in seconds.

    The first comparison waits until every query should have been heard of once, between `min_settle_s` and
    `max_settle_s`. `horizon_s` are simulated, `steps` simulated decisions beside every real one. After a comparison the
    next comes `again_s` later at the soonest, and only if a run time or the copy rate drifted by `drift_share`, or the
    set of queries that receive frames changed. A query without a frame for `silent_periods` receives none. No query may
    have less than `query_share` of its frames under `gemel`, less `query_slack` frames; where accuracy is the
    objective, no less than `accuracy_slack` below it.
    """

    min_settle_s: float = 1.0
    max_settle_s: float = 10.0
    horizon_s: float = 30.0
    steps: int = 16
    again_s: float = 60.0
    drift_share: float = 0.25
    silent_periods: float = 3.0
    query_share: float = 0.88
    query_slack: float = 1.0
    accuracy_slack: float = 0.05


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

    def with_floors(self, floor_rates: Mapping[str, float]) -> Plan:
        """The greedy scheduler's plan with the frames a second that each query is promised."""
        return replace(self.greedy, data=replace(self.greedy.data, floor_rates=floor_rates))


@dataclass(frozen=True, slots=True)
class SelectionState:
    """What is remembered: the history of runs, which scheduler runs, and the comparison under way after `steps`.

    The greedy scheduler runs with the floors `floor_rates`; None for `gemel`, which remembers `turns`. `compared` are
    the costs and the queries of the last comparison.
    """

    history: RunHistory
    compare_at: float
    floor_rates: Mapping[str, float] | None
    turns: Any = None
    comparison: Comparison | None = None
    steps: int = 0
    compared: tuple[Costs, frozenset[str]] | None = None


class SelectingPolicy:
    """`gemel` or the greedy scheduler, whichever a simulation shows to be better."""

    name = "adaptive"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        gemel, greedy = (policy.plan(costs, specs, budget_bytes) for policy in (GEMEL, GREEDY))
        return replace(greedy, data=SelectionPlan(gemel, greedy, specs))

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        data: SelectionPlan = plan.data
        memory = state.policy_state or begin_selection(state.now, data)
        memory = replace(memory, history=memory.history.with_waiting(state.waiting))
        memory = advance_selection(memory, state, costs, data)
        if memory.floor_rates is not None:
            greedy = data.with_floors(memory.floor_rates)
            decision = GREEDY.decide(replace(state, policy_state=memory.history), costs, greedy)
            if (until := wait_for_pass(decision, state, costs, data.specs, memory.history.newest)) is not None:
                return Decision(drop=decision.drop, wake_s=until, policy_state=memory)
            return replace(decision, policy_state=replace(memory, history=decision.policy_state))
        decision = GEMEL.decide(replace(state, policy_state=memory.turns), costs, data.gemel)
        if (until := wait_for_pass(decision, state, costs, data.specs, memory.history.newest)) is not None:
            return Decision(drop=decision.drop, wake_s=until, policy_state=memory)
        history = with_decision(memory.history, state, decision)
        return replace(decision, policy_state=replace(memory, history=history, turns=decision.policy_state))


def begin_selection(now: float, data: SelectionPlan) -> SelectionState:
    """The state of a box that begins now; the first comparison comes when every query should have been heard of."""
    longest_s = max(1 / spec.fps for spec in data.specs.values())
    compare_at = now + min(CONFIG.max_settle_s, max(CONFIG.min_settle_s, longest_s))
    return SelectionState(RunHistory(now), compare_at, {} if data.for_accuracy else None)


def with_decision(history: RunHistory, state: SchedulerState, decision: Decision) -> RunHistory:
    """The history once a decision has been carried out."""
    for query, count in decision.runs:
        history = history.with_run(query, waiting_after_drops(state, decision, query)[:count])
    return history


def advance_selection(
    memory: SelectionState, state: SchedulerState, costs: Costs, data: SelectionPlan
) -> SelectionState:
    """The state once a comparison that is due has begun, or the one under way was played a little further."""
    now, comparison = state.now, memory.comparison
    if comparison is None:
        if now < memory.compare_at or not state.waiting or not has_drifted(memory, now, costs, data.specs):
            return memory
        return replace(memory, comparison=Comparison(state, costs, data, memory), steps=0)
    steps = memory.steps + CONFIG.steps
    if not comparison.finish_within(steps):
        return replace(memory, steps=steps)
    return replace(
        memory, history=replace(memory.history, since=now, ran={}), floor_rates=comparison.floor_rates,
        comparison=None, compare_at=now + CONFIG.again_s, compared=(comparison.costs, comparison.active),
        turns=memory.turns if memory.floor_rates is None else None,
    )  # fmt: skip


def has_drifted(memory: SelectionState, now: float, costs: Costs, specs: Mapping[str, QuerySpec]) -> bool:
    """Whether the last comparison says nothing any more."""
    if memory.compared is None:
        return True
    before, active = memory.compared
    if active != active_queries(memory.history, now, specs):
        return True
    pairs = [(before.copy_bytes_per_s, costs.copy_bytes_per_s)]
    pairs += [(cost.run_s, costs.queries[query].run_s) for query, cost in before.queries.items()]
    pairs += [(old.cost.run_s, new.cost.run_s) for old, new in zip(before.joint, costs.joint)]
    return any(abs(new - old) > CONFIG.drift_share * old for old, new in pairs)


def active_queries(history: RunHistory, now: float, specs: Mapping[str, QuerySpec]) -> frozenset[str]:
    """The queries that received a frame of late."""
    return frozenset(
        query for query, newest in history.newest.items() if now - newest <= CONFIG.silent_periods / specs[query].fps
    )


class Comparison:
    """`gemel` and the greedy scheduler, simulated from a box's state on the expected frames.

    It is played as far as it was ever called for, and gives the same answer whenever it is called with as many steps.
    `floor_rates` are those with which the greedy scheduler then runs, None for `gemel`.
    """

    def __init__(self, state: SchedulerState, costs: Costs, data: SelectionPlan, memory: SelectionState) -> None:
        self.costs, self._data, self._memory = costs, data, memory
        self.active = active_queries(memory.history, state.now, data.specs)
        self.floor_rates: Mapping[str, float] | None = None
        self._steps, self._steps_needed = 0, None
        self._ends = state.now + CONFIG.horizon_s
        self._urgency = {query: state.urgency.get(query, spec.urgency) for query, spec in data.specs.items()}
        self._box = VirtualBox(  # a copy: the box goes on
            costs, lambda state: Decision(), BoxObserver(),
            expected_frames(memory.history, self.active, data.specs, state.now, self._ends), state.now,
            frozenset(state.resident), state.resident_bytes, None, dict(state.urgency),
            {query: tuple(captured) for query, captured in state.waiting.items()},
        )  # fmt: skip
        self._play = self._compare()

    def finish_within(self, steps: int) -> bool:
        """Whether the answer is known within so many simulated decisions in all."""
        while self._steps_needed is None and self._steps < steps:
            self._steps += 1
            if next(self._play, "over") == "over":
                self._steps_needed = self._steps
        return self._steps_needed is not None and self._steps_needed <= steps

    def _compare(self) -> Iterator[None]:
        """Play both, a decision at a time, and choose."""
        data = self._data
        start = replace(self._memory.history, since=self._box.now, ran={})
        gemel, greedy = SimulatedRuns(start), SimulatedRuns(start)
        turns = self._memory.turns if self._memory.floor_rates is None else None
        yield from self._simulate(GEMEL, data.gemel, turns, gemel)
        rates = {query: len(gemel.captured.get(query, ())) / CONFIG.horizon_s for query in data.specs}
        yield from self._simulate(GREEDY, data.with_floors(rates), start, greedy)
        theirs, mine = self._values(gemel), self._values(greedy)
        floors = {
            query: value - CONFIG.accuracy_slack
            if data.for_accuracy
            else CONFIG.query_share * value - CONFIG.query_slack
            for query, value in theirs.items()
        }
        gain = sum(self._urgency[query] * (mine[query] - theirs[query]) for query in self.active)
        if gain > 0 and all(mine[query] >= floor for query, floor in floors.items()):
            self.floor_rates = rates

    def _simulate(self, policy: Policy, plan: Plan, policy_state: Any, runs: SimulatedRuns) -> Iterator[None]:
        box = replace(
            self._box, decide=lambda state: policy.decide(state, self.costs, plan), observer=runs,
            policy_state=policy_state, waiting=dict(self._box.waiting),
        )  # fmt: skip
        while box.now < self._ends and box.step(self._ends):
            yield None

    def _values(self, runs: SimulatedRuns) -> dict[str, float]:
        """Of each query its frames in time, or its accuracy over time."""
        if not self._data.for_accuracy:
            return {query: float(len(runs.captured.get(query, ()))) for query in self.active}
        moments: dict[str, list[float]] = {query: [] for query in self.active}
        for at, query, _ in self._box.feed:
            moments[query].append(at)
        return {query: runs.accuracy(query, self._data.specs[query], moments[query]) for query in self.active}


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
