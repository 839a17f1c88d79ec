"""The greedy scheduler of `adaptive`: at each moment the run or load that brings most for its time.

What a run brings is frames in time, or accuracy over time for queries whose staleness was measured. Its time is the
load, the run, and the reloading of what it evicts, so that a resident query stays for as long as no other brings more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.queues import DEADLINE, DEPTH, MEMORY, REPLACED
from edge_runtime.scheduler.batches import batch_in_time, largest_batches, too_late
from edge_runtime.scheduler.costs import Costs, coalesce_tensors
from edge_runtime.scheduler.eviction import pick_evictions
from edge_runtime.scheduler.order import least_moving_order
from edge_runtime.scheduler.types import CLOCK_SLACK_S, Decision, Plan, QuerySpec, SchedulerState, staleness_gain

Dropped = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class UtilityConfig:
    """The weights of the greedy scheduler. Frames are frames in time.

    `floor_share` of the rate at which a query is promised frames (`UtilityPlan.floor_rates`) is what it is owed. Its
    deficit is what it is owed less what it had; a frame of it counts `deficit_base` to the power of the deficit, which
    is at most `max_deficit` and doubled for a query that should have had `few_frames` so far. From `preload_deficit` on
    a query is loaded ahead of its next frame; from `wait_deficit` on a longer run of another query waits for it.
    A frame counts `staleness_share` more for each period that the query's newest result is old, up to
    `max_stale_periods`. `min_gain` is what a result brings that is no better than the one before it.
    """

    floor_share: float = 0.9
    deficit_base: float = 4.0
    max_deficit: float = 12.0
    few_frames: float = 10.0
    preload_deficit: float = 0.5
    wait_deficit: float = 1.0
    staleness_share: float = 0.05
    max_stale_periods: float = 20.0
    min_gain: float = 1e-3


@dataclass(frozen=True, slots=True)
class UtilityPlan:
    """What the greedy scheduler knows beforehand.

    `infeasible` are the queries that do not fit the budget even alone. `floor_rates` are the frames a second that each
    query is promised; empty for no promise.
    """

    specs: Mapping[str, QuerySpec]
    infeasible: frozenset[str]
    config: UtilityConfig = field(default_factory=UtilityConfig)
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
        newest = dict(self.newest)
        newest.update((query, captured[-1]) for query, captured in waiting.items())
        return replace(self, newest=newest)

    def with_run(self, query: str, captured: Sequence[float]) -> RunHistory:
        """The history once these frames of a query have run."""
        ran = {**self.ran, query: self.ran.get(query, 0) + len(captured)}
        return replace(self, ran=ran, answered={**self.answered, query: captured[-1]})


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a query is not resident: tensors in load order, seconds to load them, bytes they will occupy."""

    tensors: tuple[str, ...] = ()
    load_s: float = 0.0
    nbytes: int = 0


ALL_RESIDENT = Missing()


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """A load, if anything is missing, and a batch of `count` frames of one query that would be in time.

    `deadline` is that of its oldest frame, `per_frame` the utility of a frame, `density` the utility per second.
    """

    query: str
    count: int
    seconds: float
    deadline: float
    per_frame: float
    density: float


class AdaptivePolicy:
    """The greedy scheduler as a policy of its own; `edge_runtime.policies.selection` says when it runs."""

    name = "adaptive-only"

    def view(self, costs: Costs) -> Costs:
        return costs

    def plan(self, costs: Costs, specs: Mapping[str, QuerySpec], budget_bytes: int) -> Plan:
        groups = coalesce_tensors(costs)
        infeasible = frozenset(query for query in costs.queries if groups.alone_bytes(query) > budget_bytes)
        order = least_moving_order(groups, budget_bytes)
        return Plan(order, largest_batches(groups, budget_bytes), budget_bytes, UtilityPlan(specs, infeasible))

    def decide(self, state: SchedulerState, costs: Costs, plan: Plan) -> Decision:
        history = (state.policy_state or RunHistory(state.now)).with_waiting(state.waiting)
        if not state.waiting:
            return Decision(policy_state=history)
        drop, waiting = drop_infeasible(state, costs, plan.data.infeasible)
        if not waiting:
            return Decision(drop=drop, policy_state=history)
        choices = Choices(state, waiting, costs, plan, history)
        decision = choices.for_accuracy() if plan.data.for_accuracy else choices.for_frames()
        return replace(decision, drop=drop + decision.drop)


def drop_infeasible(
    state: SchedulerState, costs: Costs, infeasible: frozenset[str]
) -> tuple[tuple[Dropped, ...], dict[str, Sequence[float]]]:
    """The frames to drop, which could not be in time even if they ran now and alone; and what else waits."""
    drop: list[Dropped] = []
    waiting: dict[str, Sequence[float]] = {}
    for query, captured in state.waiting.items():
        if query in infeasible:
            drop += [(query, captured_at, MEMORY) for captured_at in captured]
            continue
        late = too_late(captured, state.now, costs.queries[query], 1)
        drop += [(query, captured_at, DEADLINE) for captured_at in captured[:late]]
        if late < len(captured):
            waiting[query] = captured[late:]
    return tuple(drop), waiting


class Choices:
    """What could run in one state. `waiting` are the frames that could be in time, oldest first (captured_at)."""

    def __init__(
        self,
        state: SchedulerState,
        waiting: Mapping[str, Sequence[float]],
        costs: Costs,
        plan: Plan,
        history: RunHistory,
    ) -> None:
        self._state, self._waiting, self._costs, self._plan, self._history = state, waiting, costs, plan, history
        self._data: UtilityPlan = plan.data
        self._config, self._specs = self._data.config, self._data.specs
        self._missing = {query: self._look_up(query) for query in waiting}
        self._feasible: set[str] = set()
        self._rates: list[tuple[str, float, float]] | None = None

    def for_frames(self) -> Decision:
        """The most frames in time, each by its weight."""
        kept = feasible_together(self._state.now, self._candidates())
        ahead = self._preload(kept)
        if ahead is not None:
            return ahead
        again_s = []
        for run in kept:
            next_frame_s = self._awaited_frame(run)
            if next_frame_s is not None:
                again_s.append(next_frame_s + 2 * CLOCK_SLACK_S)
                continue
            decision = self._best_batch(run)
            if decision is not None:
                return decision
        # The first of these frames must be dropped once it is lost; a frame that has not come is no longer awaited.
        lost_s = min(
            captured[0] + self._costs.queries[query].sla_s - self._costs.queries[query].run_s
            for query, captured in self._waiting.items()
        )
        return Decision(wake_s=min([lost_s + 2 * CLOCK_SLACK_S, *again_s]), policy_state=self._history)

    def for_accuracy(self) -> Decision:
        """The most accuracy over time: of each query its newest frame alone, that which gains most for its time."""
        best, most, wake_s = None, 0.0, math.inf
        for query, captured in self._waiting.items():
            cost, missing, newest = self._costs.queries[query], self._missing[query], captured[-1]
            wake_s = min(wake_s, newest + cost.sla_s - cost.run_s + 2 * CLOCK_SLACK_S)
            in_time = not too_late(captured[-1:], self._state.now + missing.load_s, cost, 1)
            if not in_time and not missing.tensors:
                continue
            seconds = missing.load_s + cost.run_s + self._reload_s(query)
            density = self._gain(query, newest) / max(seconds, CLOCK_SLACK_S)
            if density > most:
                evict = pick_evictions(self._state, self._costs, self._plan, query, missing.tensors, 1)
                if evict is not None:
                    best, most = (query, int(in_time), evict), density
        replaced = tuple(
            (query, captured_at, REPLACED) for query, captured in self._waiting.items() for captured_at in captured[:-1]
        )
        if best is None:
            return Decision(drop=replaced, wake_s=wake_s, policy_state=self._history)
        query, count, evict = best
        history = self._history.with_run(query, self._waiting[query][-1:]) if count else self._history
        return Decision(query, count, evict, self._missing[query].tensors, replaced, policy_state=history)

    def _candidates(self) -> list[CandidateRun]:
        """A run for every query of which some frame can be in time, and whose load is worth the frames lost by it."""
        found = []
        for query in self._waiting:
            run = self._candidate(query)
            if run is None:
                continue
            if self._missing[query].tensors and run.count * run.per_frame <= self._frames_lost(run.seconds, query):
                continue
            self._feasible.add(query)
            found.append(run)
        return found

    def _candidate(self, query: str) -> CandidateRun | None:
        cost, captured, load_s = self._costs.queries[query], self._waiting[query], self._missing[query].load_s
        batch = batch_in_time(captured, self._state.now + load_s, cost, self._plan.batches[query])
        if not batch.count:
            return None
        seconds = load_s + cost.run_of(batch.count)
        per_frame = self._deficit_weight(query) * self._urgency(query)
        density = batch.count * per_frame / max(seconds + self._reload_s(query), CLOCK_SLACK_S)
        # Where the mailbox is full when the next frame comes, the oldest is lost before its deadline.
        full_s = captured[-1] + (DEPTH + 1 - len(captured)) / self._specs[query].fps
        deadline = min(captured[batch.late] + cost.sla_s, full_s + cost.run_of(batch.count))
        return CandidateRun(query, batch.count, seconds, deadline, per_frame, density)

    def _preload(self, kept: Sequence[CandidateRun]) -> Decision | None:
        """Load the query none of whose frames would be in time after its load, if that beats all of `kept`.

        Only one with a deficit, or any for which nothing must go while nothing else could be done.
        """
        best: tuple[float, str] | None = None
        for query, missing in self._missing.items():
            cost = self._costs.queries[query]
            if not missing.tensors or query in self._feasible or cost.run_s > cost.sla_s:
                continue
            deficit, reload_s = self._deficit(query), self._reload_s(query)
            if deficit < self._config.preload_deficit and (kept or reload_s):
                continue
            captured = self._waiting[query]
            if too_late(captured, self._state.now + missing.load_s, cost, 1) < len(captured):
                continue
            frames = max(1.0, deficit)
            density = frames * self._deficit_weight(query) / (missing.load_s + frames * cost.run_s + reload_s)
            best = max(best, (density, query)) if best else (density, query)
        if best is None or any(run.density > best[0] for run in kept):
            return None
        missing = self._missing[best[1]]
        evict = pick_evictions(self._state, self._costs, self._plan, best[1], missing.tensors, 1)
        return None if evict is None else Decision(best[1], 0, evict, missing.tensors, policy_state=self._history)

    def _awaited_frame(self, run: CandidateRun) -> float | None:
        """When a frame is to come that brings more for its time and could not be in time after this run; None where
        there is none such.
        """
        end = self._state.now + run.seconds
        for query, newest in self._history.newest.items():
            if query in self._feasible or self._deficit(query) < self._config.wait_deficit:
                continue
            cost, comes = self._costs.queries[query], newest + 1 / self._specs[query].fps
            if (
                comes >= self._state.now
                and end > comes + cost.sla_s - cost.run_s
                and self._deficit_weight(query) > run.density * cost.run_s
                and cost.needed <= self._state.resident
            ):
                return comes
        return None

    def _best_batch(self, run: CandidateRun) -> Decision | None:
        """The batch that brings most for its time, what it evicts and the frames lost meanwhile counted in.

        None when there is no room for the query.
        """
        query, cost, captured = run.query, self._costs.queries[run.query], self._waiting[run.query]
        missing = self._missing[query]
        start, best, most = self._state.now + missing.load_s, None, -math.inf
        for_all = pick_evictions(self._state, self._costs, self._plan, query, missing.tensors, run.count)
        for count in range(1, run.count + 1):
            evict = for_all
            if for_all != () and count < run.count:
                evict = pick_evictions(self._state, self._costs, self._plan, query, missing.tensors, count)
            late = too_late(captured, start, cost, count)
            if evict is None or len(captured) - late < count:
                break
            seconds = missing.load_s + cost.run_of(count)
            lost = self._frames_lost(seconds, query) if run.count > 1 else 0.0
            reload_s = self._costs.load_s(self._costs.moved_bytes(evict))
            gain = (count * run.per_frame - lost) / max(seconds + reload_s, CLOCK_SLACK_S)
            if gain > most:
                best, most = (count, late, evict), gain
        if best is None:
            return None
        count, late, evict = best
        drop = tuple((query, captured_at, DEADLINE) for captured_at in captured[:late])
        history = self._history.with_run(query, captured[late : late + count])
        return Decision(query, count, evict, missing.tensors, drop, policy_state=history)

    def _owed_frames(self, query: str) -> float:
        """Frames that the query should have had by now."""
        return (self._state.now - self._history.since) * self._data.floor_rates.get(query, 0.0)

    def _deficit(self, query: str) -> float:
        """Frames that the query lacks of its floor; negative when it had more."""
        return self._config.floor_share * self._owed_frames(query) - self._history.ran.get(query, 0)

    def _deficit_weight(self, query: str) -> float:
        """How many times as much a frame counts for the query's deficit, as in max-weight scheduling (Tassiulas and
        Ephremides 1992). A query that is promised few frames feels each of them missed more.
        """
        deficit = self._deficit(query)
        if deficit <= 0:
            return 1.0
        scaled = deficit * (1 + self._config.few_frames / self._owed_frames(query))
        return self._config.deficit_base ** min(self._config.max_deficit, scaled)

    def _urgency(self, query: str) -> float:
        """What a stale result of the query costs, the more the older its newest one is."""
        spec, now = self._specs[query], self._state.now
        periods = (now - self._history.answered.get(query, now)) * spec.fps
        urgency = self._state.urgency.get(query, spec.urgency)
        return urgency * (1 + self._config.staleness_share * min(self._config.max_stale_periods, periods))

    def _gain(self, query: str, captured_at: float) -> float:
        """The accuracy over time that a result for this frame brings, in seconds of full accuracy."""
        spec, known = self._specs[query], self._history.answered.get(query)
        curve = spec.staleness or (1.0, 0.0)
        frames = float(len(curve)) if known is None else max(0.0, (captured_at - known) * spec.fps)
        gain = max(self._config.min_gain, staleness_gain(curve, frames)) / spec.fps
        return self._state.urgency.get(query, spec.urgency) * gain

    def _look_up(self, query: str) -> Missing:
        cost, resident = self._costs.queries[query], self._state.resident
        if cost.needed <= resident:
            return ALL_RESIDENT
        tensors = tuple(name for name in cost.tensors if name not in resident)
        load_s = self._costs.load_s(self._costs.moved_bytes(tensors))
        return Missing(tensors, load_s, self._costs.resident_bytes(tensors))

    def _reload_s(self, query: str) -> float:
        """About how long it takes to bring back what must go for one frame of this query."""
        needed = self._costs.queries[query].workspace_bytes + self._missing[query].nbytes
        return max(0, self._state.resident_bytes + needed - self._plan.budget_bytes) / self._costs.copy_bytes_per_s

    def _frames_lost(self, seconds: float, query: str) -> float:
        """Frames of resident queries that come too late while the box is busy for `seconds` with `query`."""
        if self._rates is None:
            self._rates = [
                (other, spec.fps, cost.sla_s - cost.run_s)
                for other, spec in self._specs.items()
                if (cost := self._costs.queries[other]).needed <= self._state.resident
            ]
        return sum(
            fps * (seconds - wait_s) for other, fps, wait_s in self._rates if other != query and seconds > wait_s
        )


def feasible_together(now: float, runs: Sequence[CandidateRun]) -> list[CandidateRun]:
    """The runs to keep, in order of their deadlines, so that each is done by its own when run in this order.

    Moore (1968) and Hodgson: take jobs by deadline, and whenever they are too many for the time, give one up. With
    equal jobs, giving up the longest loses the fewest; here the one with the least utility per second goes.
    """
    kept: list[CandidateRun] = []
    total_s = 0.0
    for run in sorted(runs, key=lambda run: (run.deadline, run.query)):
        kept.append(run)
        total_s += run.seconds
        while kept and now + total_s > kept[-1].deadline + CLOCK_SLACK_S:
            least = min(kept, key=lambda run: (run.density, run.query))
            kept.remove(least)
            total_s -= least.seconds
    return kept
