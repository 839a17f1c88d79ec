"""The greedy scheduler of `adaptive`: at each moment the run or load that brings most for its time.

What a run brings is frames in time, or accuracy over time for queries whose staleness was measured. Its time is the
load, the run, and the reloading of what it evicts, so that a resident query stays for as long as no other brings more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from gemel.edge_runtime.frames.queues import DEADLINE, DEPTH, MEMORY, REPLACED
from gemel.edge_runtime.scheduler.batches import batch_in_time, largest_batches, too_late
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors
from gemel.edge_runtime.scheduler.eviction import pick_evictions
from gemel.edge_runtime.scheduler.joint import join_queries, waiting_after_drops
from gemel.edge_runtime.scheduler.order import share_order
from gemel.edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, QuerySpec, SchedulerState, staleness_gain


@dataclass(frozen=True, slots=True)
class UtilityConfig:
    """The weights of the greedy scheduler. Frames are frames in time.

    `floor_share` of the rate at which a query is promised frames (`UtilityPlan.floor_rates`) is what it is owed. Its
    deficit is what it is owed less what it had; a frame of it counts `deficit_base` to the power of the deficit, which
    is at most `max_deficit`. From `preload_deficit` on a query is loaded ahead of its next frame. `min_gain` is what a
    result brings that is no better than the one before it.
    """

    floor_share: float = 0.9
    deficit_base: float = 4.0
    max_deficit: float = 12.0
    preload_deficit: float = 0.5
    min_gain: float = 1e-3


CONFIG = UtilityConfig()


@dataclass(frozen=True, slots=True)
class UtilityPlan:
    """What the greedy scheduler knows beforehand.

    `infeasible` are the queries that do not fit the budget even alone. `floor_rates` are the frames a second that each
    query is promised; empty for no promise.
    """

    specs: Mapping[str, QuerySpec]
    infeasible: frozenset[str]
    floor_rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def for_accuracy(self) -> bool:
        """Whether the objective is accuracy over time."""
        return any(spec.staleness for spec in self.specs.values())


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What the greedy scheduler remembers since `since`: of each query how many frames ran, when the frame of its
    newest result was captured (`answered`), and when its newest frame was (`newest`).
    """

    since: float
    ran: Mapping[str, int] = field(default_factory=dict)
    answered: Mapping[str, float] = field(default_factory=dict)
    newest: Mapping[str, float] = field(default_factory=dict)

    def with_waiting(self, waiting: Mapping[str, Sequence[float]]) -> RunHistory:
        """The history once the waiting frames are known."""
        return replace(self, newest={**self.newest, **{query: captured[-1] for query, captured in waiting.items()}})

    def with_run(self, query: str, captured: Sequence[float]) -> RunHistory:
        """The history once these frames of a query have run."""
        ran = {**self.ran, query: self.ran.get(query, 0) + len(captured)}
        return replace(self, ran=ran, answered={**self.answered, query: captured[-1]})


class CandidateRun(NamedTuple):
    """A load, if anything is missing, and a batch of `count` frames of one query that would be in time.

    `deadline` is that of its oldest frame, `density` the utility per second.
    """

    query: str
    count: int
    seconds: float
    deadline: float
    density: float


class AdaptivePolicy:
    """The greedy scheduler as a policy of its own; `edge_runtime.policies.selection` says when it runs."""

    name = "adaptive-only"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        groups = coalesce_tensors(costs)
        infeasible = frozenset(query for query in costs.queries if groups.alone_bytes(query) > budget_bytes)
        data = UtilityPlan(specs, infeasible)
        return Plan(share_order(groups), largest_batches(groups, budget_bytes), budget_bytes, data)

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        history = (state.policy_state or RunHistory(state.now)).with_waiting(state.waiting)
        drop: list[tuple[str, float, str]] = []
        waiting: dict[str, Sequence[float]] = {}
        for query, captured in state.waiting.items():
            if query in plan.data.infeasible:
                drop += [(query, captured_at, MEMORY) for captured_at in captured]
                continue
            late = too_late(captured, state.now, costs.queries[query], 1)
            drop += [(query, captured_at, DEADLINE) for captured_at in captured[:late]]
            if late < len(captured):
                waiting[query] = captured[late:]
        if not waiting:
            return Decision(drop=tuple(drop), policy_state=history)
        choices = Choices(state, waiting, costs, plan, history)
        decision = choices.for_accuracy() if plan.data.for_accuracy else choices.for_frames()
        decision = join_queries(replace(decision, drop=(*drop, *decision.drop)), state, costs, plan)
        history = decision.policy_state
        for query, count in decision.also:
            history = history.with_run(query, waiting_after_drops(state, decision, query)[:count])
        return replace(decision, policy_state=history)


class Choices:
    """What could run in one state. `waiting` are the frames that could be in time, oldest first (captured_at)."""

    def __init__(
        self, state: SchedulerState, waiting: Mapping[str, Sequence[float]], costs: Costs, plan: Plan,
        history: RunHistory,
    ) -> None:  # fmt: skip
        self._state, self._waiting, self._costs, self._plan, self._history = state, waiting, costs, plan, history
        self._data: UtilityPlan = plan.data
        self._missing = {query: self._find_missing(query) for query in waiting}
        self._load_s = {query: costs.load_s(costs.moved_bytes(names)) for query, names in self._missing.items()}
        self._reload_s = {query: self._find_reload_s(query) for query in waiting}
        self._deficit = {query: self._find_deficit(query) for query in waiting}

    def for_frames(self) -> Decision:
        """The most frames in time, each by its weight."""
        kept = feasible_together(self._state.now, [run for query in self._waiting for run in self._candidate(query)])
        ahead = self._preload(kept)
        if ahead is not None:
            return ahead
        for run in kept:
            decision = self._start(run)
            if decision is not None:
                return decision
        # The first of these frames must be dropped once it is lost.
        lost_s = min(
            captured[0] + self._costs.queries[query].sla_s - self._costs.queries[query].run_s
            for query, captured in self._waiting.items()
        )
        return Decision(wake_s=lost_s + 2 * CLOCK_SLACK_S, policy_state=self._history)

    def for_accuracy(self) -> Decision:
        """The most accuracy over time: of each query its newest frame alone, that which gains most for its time."""
        best, most, wake_s = None, 0.0, math.inf
        for query, captured in self._waiting.items():
            cost, missing, newest = self._costs.queries[query], self._missing[query], captured[-1]
            wake_s = min(wake_s, newest + cost.sla_s - cost.run_s + 2 * CLOCK_SLACK_S)
            in_time = not too_late(captured[-1:], self._state.now + self._load_s[query], cost, 1)
            if not in_time and not missing:
                continue
            seconds = self._load_s[query] + cost.run_s + self._reload_s[query]
            density = self._gain(query, newest) / max(seconds, CLOCK_SLACK_S)
            if density > most:
                evict = pick_evictions(self._state, self._costs, self._plan, query, missing, 1)
                if evict is not None:
                    best, most = (query, int(in_time), evict), density
        replaced = tuple(
            (query, captured_at, REPLACED) for query, captured in self._waiting.items() for captured_at in captured[:-1]
        )
        if best is None:
            return Decision(drop=replaced, wake_s=wake_s, policy_state=self._history)
        query, count, evict = best
        history = self._history.with_run(query, self._waiting[query][-1:]) if count else self._history
        return Decision(query, count, evict, self._missing[query], replaced, policy_state=history)

    def _candidate(self, query: str) -> list[CandidateRun]:
        """The largest batch of a query that would be in time, if any frame would be."""
        cost, captured, load_s = self._costs.queries[query], self._waiting[query], self._load_s[query]
        if self._state.now + load_s + cost.run_s > captured[-1] + cost.sla_s + 2 * CLOCK_SLACK_S:
            return []  # not even the newest one: as `batch_in_time` would say
        batch = batch_in_time(captured, self._state.now + load_s, cost, self._plan.batches[query])
        if not batch.count:
            return []
        seconds = load_s + cost.run_of(batch.count)
        utility = batch.count * self._deficit_weight(query) * self._urgency(query)
        density = utility / max(seconds + self._reload_s[query], CLOCK_SLACK_S)
        # Where the mailbox is full when the next frame comes, the oldest is lost before its deadline.
        full_s = captured[-1] + (DEPTH + 1 - len(captured)) / self._data.specs[query].fps
        deadline = min(captured[batch.late] + cost.sla_s, full_s + cost.run_of(batch.count))
        return [CandidateRun(query, batch.count, seconds, deadline, density)]

    def _preload(self, kept: Sequence[CandidateRun]) -> Decision | None:
        """Load the query none of whose frames would be in time after its load, if that beats all of `kept`.

        Only one with a deficit, or any for which nothing must go while nothing else could be done.
        """
        most, best = max((run.density for run in kept), default=0.0), ""
        for query, missing in self._missing.items():
            cost, load_s, captured = self._costs.queries[query], self._load_s[query], self._waiting[query]
            deficit, reload_s = self._deficit[query], self._reload_s[query]
            if not missing or too_late(captured, self._state.now + load_s, cost, 1) < len(captured):
                continue
            if cost.run_s <= cost.sla_s and (deficit >= CONFIG.preload_deficit or not (kept or reload_s)):
                frames = max(1.0, deficit)
                density = frames * self._deficit_weight(query) / (load_s + frames * cost.run_s + reload_s)
                most, best = max((most, best), (density, query))
        if not best:
            return None
        evict = pick_evictions(self._state, self._costs, self._plan, best, self._missing[best], 1)
        return None if evict is None else Decision(best, 0, evict, self._missing[best], policy_state=self._history)

    def _start(self, run: CandidateRun) -> Decision | None:
        """The run, with fewer frames where memory allows no more; None when there is no room for the query."""
        query, cost, captured, missing = (
            run.query, self._costs.queries[run.query], self._waiting[run.query], self._missing[run.query],
        )  # fmt: skip
        for count in range(run.count, 0, -1):
            evict = pick_evictions(self._state, self._costs, self._plan, query, missing, count)
            if evict is not None:
                late = too_late(captured, self._state.now + self._load_s[query], cost, count)
                drop = tuple((query, captured_at, DEADLINE) for captured_at in captured[:late])
                history = self._history.with_run(query, captured[late : late + count])
                return Decision(query, count, evict, missing, drop, policy_state=history)
        return None

    def _find_deficit(self, query: str) -> float:
        """Frames that the query lacks of its floor; negative when it had more."""
        owed = (self._state.now - self._history.since) * self._data.floor_rates.get(query, 0.0)
        return CONFIG.floor_share * owed - self._history.ran.get(query, 0)

    def _deficit_weight(self, query: str) -> float:
        """How many times as much a frame counts for the query's deficit, as in max-weight scheduling (Tassiulas and
        Ephremides 1992).
        """
        return CONFIG.deficit_base ** min(CONFIG.max_deficit, max(0.0, self._deficit[query]))

    def _urgency(self, query: str) -> float:
        return self._state.urgency.get(query, self._data.specs[query].urgency)

    def _gain(self, query: str, captured_at: float) -> float:
        """The accuracy over time that a result for this frame brings, in seconds of full accuracy."""
        spec, known = self._data.specs[query], self._history.answered.get(query)
        curve = spec.staleness or (1.0, 0.0)
        frames = float(len(curve)) if known is None else max(0.0, (captured_at - known) * spec.fps)
        return self._urgency(query) * max(CONFIG.min_gain, staleness_gain(curve, frames)) / spec.fps

    def _find_missing(self, query: str) -> tuple[str, ...]:
        cost, resident = self._costs.queries[query], self._state.resident
        return () if cost.needed <= resident else tuple(name for name in cost.tensors if name not in resident)

    def _find_reload_s(self, query: str) -> float:
        """About how long it takes to bring back what must go for one frame of this query."""
        needed = self._costs.queries[query].workspace_bytes + self._costs.resident_bytes(self._missing[query])
        return max(0, self._state.resident_bytes + needed - self._plan.budget_bytes) / self._costs.copy_bytes_per_s


def feasible_together(now: float, runs: Sequence[CandidateRun]) -> list[CandidateRun]:
    """The runs to keep, in order of their deadlines, so that each is done by its own when run in this order.

    Moore (1968) and Hodgson: take jobs by deadline, and whenever they are too many for the time, give one up. With
    equal jobs, giving up the longest loses the fewest; here the one with the least utility per second goes.
    """
    kept: list[CandidateRun] = []
    by_density: list[tuple[float, str, float]] = []
    given_up: set[str] = set()
    total_s = 0.0
    for run in sorted(runs, key=lambda run: (run.deadline, run.query)):
        kept.append(run)
        heappush(by_density, (run.density, run.query, run.seconds))
        total_s += run.seconds
        while kept and now + total_s > kept[-1].deadline + CLOCK_SLACK_S:
            _, query, seconds = heappop(by_density)
            given_up.add(query)
            total_s -= seconds
            while kept and kept[-1].query in given_up:
                kept.pop()
    return [run for run in kept if run.query not in given_up]
