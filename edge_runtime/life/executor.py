"""The executor: one thread takes a snapshot, lets the policy decide, applies the decision, and measures its costs."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.engines.base import CHECKED_FRAMES
from gemel.edge_runtime.frames.queues import DEADLINE, PAUSED, Frame, Mailboxes
from gemel.edge_runtime.frames.results import Publisher
from gemel.edge_runtime.life.device import Device
from gemel.edge_runtime.scheduler import Decision, Plan, Policy, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import CostEstimates, Costs, JointCost
from gemel.edge_runtime.scheduler.eviction import pick_evictions
from gemel.edge_runtime.scheduler.joint import run_seconds
from gemel.edge_runtime.simulation.trace import TraceWriter
from gemel.models.errors import one_line
from gemel.models.predictions import Prediction

MAX_IDLE_S, MIN_SLEEP_S = 0.25, 0.001
WARM_UP_RUNS = 3
"""Of each query; the first pays for one-time setup, the best of the others counts."""
WARM_UP_TIMEOUT_S = 120.0
"""How long one step of the warm-up may last, which may compile what it runs."""
MAX_CHECKED_FRAMES = 8
"""Frames of the comparison of a pass with separate runs."""
MAX_QUERY_FAILURES = 3
"""Failures in a row after which a query pauses."""
QUERY_PAUSES = BackOff(1.0, 60.0, spread=0.25)
MAX_POLICY_FAILURES = 10
POLICY_PAUSES = BackOff(0.1, 2.0, spread=0.0)
MIN_HANG_S, HANG_FACTOR = 6.0, 10.0
"""A step hangs when it lasts this many times its expected duration, and at least so long."""
WATCH_INTERVAL_S = 0.2
"""Interval of the watchdog's checks."""
MAX_WATCH_GAP_S = 5 * WATCH_INTERVAL_S
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"

log = logging.getLogger("gemel.run")


class Breaker:
    """Circuit breaker of one query, without clock or thread; `chance` gives random numbers in [0, 1).

    Closed: the query runs. Open: it pauses, longer after every trip, so that the others have its time. Half-open: the
    pause is over, and the next run decides.
    """

    def __init__(self, pauses: BackOff = QUERY_PAUSES, chance: Callable[[], float] = random.random) -> None:
        self._pauses, self._chance = pauses, chance
        self._failures = self._trips = 0
        self.open_until = -math.inf

    def state(self, now: float) -> str:
        """Closed, open or half-open at this moment."""
        if not self._trips:
            return CLOSED
        return OPEN if now < self.open_until else HALF_OPEN

    def record_failure(self, now: float) -> None:
        """Count a failed run; the breaker opens after some in a row, and after one while it is half-open."""
        self._failures += 1
        if self._trips or self._failures >= MAX_QUERY_FAILURES:
            self._trips += 1
            self.open_until = now + self._pauses.wait_s(self._trips, self._chance())

    def record_success(self) -> bool:
        """Whether this closes the breaker again."""
        has_recovered = self._trips > 0
        self._failures = self._trips = 0
        return has_recovered


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """One step, compared by identity: its description, and how many seconds it may last."""

    text: str
    timeout_s: float

    @classmethod
    def expecting(cls, text: str, expected_s: float) -> Activity:
        """A step with an expected duration."""
        return cls(text, max(MIN_HANG_S, HANG_FACTOR * expected_s))


class Watchdog:
    """Detects a step that hangs, from activity and time alone.

    Of the time between two checks only `MAX_WATCH_GAP_S` counts, so that a suspended process is no hang.
    """

    def __init__(self) -> None:
        self._activity: Activity | None = None
        self._checked_at = self._lasts_s = 0.0

    def check(self, activity: Activity | None, now: float) -> str | None:
        """A line on the step that hangs, or None."""
        if activity is not self._activity:
            self._activity, self._lasts_s = activity, 0.0
        else:
            self._lasts_s += min(MAX_WATCH_GAP_S, now - self._checked_at)
        self._checked_at = now
        if activity is None or self._lasts_s <= activity.timeout_s:
            return None
        return f"{activity.text} has not ended for {self._lasts_s:.1f} s"


@dataclass(slots=True)
class JointCounts:
    """Runs of several queries in one pass: how many, the queries in them in sum, and their frames."""

    runs: int = 0
    queries: int = 0
    frames: int = 0

    def add(self, queries: int, frames: int) -> None:
        """Count a run."""
        self.runs += 1
        self.queries += queries
        self.frames += frames


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Seconds and bytes of a turn's load, seconds of its run, where they could be measured."""

    load_s: float | None = None
    moved_bytes: int = 0
    run_s: float | None = None


class PolicyFailed(Exception):
    """The policy failed again and again, so that nothing can be decided."""


class Executor:
    """Runs the queries of a bundle over the frames in the mailboxes, by the schedule, within the budget.

    The initial costs are corrected with every load and run. Where loads overlap runs (`Device.overlaps`), layers start
    as they arrive, and the next load begins during the present run. A query whose runs fail pauses (`Breaker`); a
    policy that raises is called again after a pause, without its state. `urgency` is the present cost of stale results;
    `on_turn` is called after every turn. Frames and `clock` use the same seconds. Call it from one thread; `activity`
    may be read from any.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        specs: Mapping[str, QuerySpec],
        mailboxes: Mailboxes,
        publisher: Publisher,
        urgency: Callable[[], Mapping[str, float]] = dict,
        trace: TraceWriter | None = None,
        on_turn: Callable[[str, TurnTiming], object] = lambda query, timing: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.policy, self.mailboxes, self.publisher = device, policy, mailboxes, publisher
        self._specs, self._urgency, self._trace, self._on_turn, self.clock = specs, urgency, trace, on_turn, clock
        self.activity: Activity | None = None
        self._breakers = {query: Breaker() for query in device.engines}
        self._wake_s: float | None = None
        self._policy_state: Any = None
        self._policy_failures, self._decide_at = 0, -math.inf
        self._warming: Iterator[None] | None = None
        self._cold: frozenset[str] = frozenset()
        self._unchecked = device.costs.joint
        self._estimates = CostEstimates(device.costs.with_joint(()))
        self.joint = JointCounts()
        self._last_plan = self._make_plan()

    @property
    def costs(self) -> Costs:
        """The present cost estimates, over groups of tensors (`TensorGroups`)."""
        return self._estimates.costs

    @property
    def checks_passes(self) -> bool:
        """Whether the warm-up has passes for several queries to compare with separate runs; until then none runs."""
        return bool(self._unchecked)

    @property
    def order(self) -> tuple[str, ...]:
        """The cyclic order of the plan."""
        return self._plan.order

    @property
    def cold(self) -> frozenset[str]:
        """The queries that are not warmed up yet, or could not be."""
        return self._cold | self.publisher.disabled

    @property
    def _plan(self) -> Plan:
        """The plan, remade after the device ran out of memory."""
        if self._last_plan.budget_bytes != self.device.budget_bytes:
            self._last_plan = self._make_plan()
        return self._last_plan

    def _make_plan(self) -> Plan:
        return self.policy.plan(self.costs, self._specs, self.device.budget_bytes)

    def warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        """Load and run every query on a frame of its camera (RGB uint8, H, W, 3) to measure loads and runs; then plan.

        A query that fails here is disabled.
        """
        self.begin_warm_up(frames, self.device.engines)
        while self.warm_up_step():
            pass

    def begin_warm_up(self, frames: Mapping[str, np.ndarray], queries: Collection[str]) -> None:
        """Let `warm_up_step` do the same for these queries, one run at a time; until then they take no frames."""
        self._cold = frozenset(queries) - self.publisher.disabled
        self._warming = self._warm_up_steps(frames)

    def warm_up_step(self) -> bool:
        """One run of the warm-up; False where there is none."""
        if self._warming is None:
            return False
        self.activity = Activity("the warm-up", WARM_UP_TIMEOUT_S)
        try:
            next(self._warming)
        except StopIteration:
            self._warming = None
        finally:
            self.activity = None
        return True

    def _warm_up_steps(self, frames: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Between two steps other queries may evict the present one, which is then loaded again."""
        arena, clock = self.device.arena, self.clock
        moved_bytes, load_s, run_s = 0, 0.0, dict[str, float]()
        for query in [query for query in self._plan.order if query in self._cold]:
            runs: list[float] = []
            try:
                while len(runs) < WARM_UP_RUNS:
                    if not runs or not self.device.is_resident(query):
                        start, before = clock(), arena.bytes_moved
                        self._load_for_warm_up(query)
                        load_s += clock() - start
                        moved_bytes += arena.bytes_moved - before
                    start = clock()
                    self.device.run(query, [frames[query]])
                    runs.append(clock() - start)
                    yield
                run_s[query] = min(runs[1:])
            except Exception as error:
                self.publisher.disable(query, error)
        self._cold = frozenset()
        for joint in self._unchecked:
            self._check_pass(joint, frames, run_s)
            yield
        self._unchecked = ()
        has_loaded = moved_bytes > 0 and load_s > 0
        self._finish_warm_up(run_s, moved_bytes / load_s if has_loaded else self.costs.copy_bytes_per_s)

    def _check_pass(
        self, joint: JointCost, frames: Mapping[str, np.ndarray], run_s: Mapping[str, float]
    ) -> None:  # fmt: skip
        """Use a pass from now on if its outputs are those of separate runs; its cost is measured where it is unknown.

        Where memory does not hold all its queries at once, it is checked with as many as it holds.
        """
        queries = [query for query in joint.queries if query not in self.publisher.disabled]
        costs, workspace = self.device.costs, joint.cost.workspace_of(min(joint.cost.largest, MAX_CHECKED_FRAMES))
        while len(queries) > 1:
            needed = frozenset[str]().union(*(costs.queries[query].needed for query in queries))
            if costs.resident_bytes(needed) + workspace <= self.device.budget_bytes:
                break
            queries.pop()
        if len(queries) < 2:
            return
        queries = queries[: MAX_CHECKED_FRAMES // CHECKED_FRAMES]
        pictures = {query: frames[query] for query in queries}
        try:
            problem = self.device.joint_difference(pictures)
            if problem is None and joint.cost.run_s == 0.0:
                start = self.clock()
                self.device.run_joint({query: [frame] for query, frame in pictures.items()})
                joint = JointCost(joint.queries, joint.cost.with_run_s((self.clock() - start) / len(queries)))
        except Exception as error:
            problem = one_line(error)
            self.device.refresh_resident()
        if problem is not None:
            log.warning("queries %s run one after the other: %s", ", ".join(joint.queries), problem)
            return
        log.info("queries %s can run in one pass", ", ".join(joint.queries))
        self._estimates.costs = self._estimates.costs.with_joint((*self._estimates.costs.joint, joint))

    def _load_for_warm_up(self, query: str) -> None:
        resident, resident_bytes = self.device.resident_groups()
        missing = tuple(group for group in self.costs.queries[query].tensors if group not in resident)
        state = SchedulerState(0.0, {}, resident, resident_bytes)
        evict = pick_evictions(state, self.costs, self._plan, query, missing, 1)
        self.device.load(((query, 0),), evict or (), bool(missing))

    def _finish_warm_up(self, run_s: Mapping[str, float], copy_bytes_per_s: float) -> None:
        self._estimates.set_measured(run_s, copy_bytes_per_s)
        for query, seconds in run_s.items():
            sla_s = self.costs.queries[query].sla_s
            if seconds > sla_s:
                log.warning(
                    "query %s takes %.0f ms a frame, its SLA is %.0f ms: its frames will be dropped",
                    query, 1000 * seconds, 1000 * sla_s,
                )  # fmt: skip
        self._last_plan = self._make_plan()
        if self._trace is not None:
            self._trace.begin(
                self.policy.name, self.costs, self._estimates.best_s, self._specs, self.device.budget_bytes,
                self.device.resident_groups()[0],
            )  # fmt: skip

    def change_rates(self, rates: Mapping[str, float]) -> None:
        """Plan for these frames a second of each query."""
        specs = {query: replace(spec, fps=rates[query]) for query, spec in self._specs.items()}
        if specs != self._specs:
            self._specs = specs
            self._last_plan = self._make_plan()

    def inherit_costs(self, before: Executor, queries: Collection[str]) -> None:
        """Take over the measured costs of another executor for these queries, which run as long as they did."""
        run_s = {query: before.costs.queries[query].run_s for query in queries}
        self._estimates.set_measured(run_s, before.costs.copy_bytes_per_s)
        self._last_plan = self._make_plan()

    def step(self) -> bool:
        """Take a snapshot, decide, apply; False when there was nothing to load or run. Raises PolicyFailed.

        Where no frame waits, the policy is not asked.
        """
        try:
            state = self._snapshot()
            if not state.waiting:
                self._wake_s = None
                return False
            decision = self._decide(state)
            return decision is not None and self._apply(state, decision)
        finally:
            self.activity = None

    def sleep_s(self) -> float:
        """After a step without work: how long to sleep unless a frame comes."""
        until_s = MAX_IDLE_S if self._wake_s is None else self._wake_s - self.clock()
        return min(MAX_IDLE_S, max(MIN_SLEEP_S, until_s))

    def to_json(self) -> list[dict[str, Any]]:
        """Per query: measured run time, 95th percentile of its results' ages, its last failure, its breaker."""
        return [
            {
                "id": query,
                "run_ms": round(1000 * self._estimates.mean_s(query), 3),
                "age_p95_ms": self.publisher.age_p95_ms(query),
                "last_failure": self.publisher.failures.get(query),
                "breaker": self._breakers[query].state(self.clock()),
            }
            for query in self.device.engines
        ]

    def _snapshot(self) -> SchedulerState:
        """The present state; frames of disabled queries fail here, and those of paused ones are dropped."""
        now, waiting = self.mailboxes.snapshot(self.clock)
        for query in list(waiting):
            if query in self.publisher.disabled:
                self.publisher.fail(query, self.mailboxes.take(query, len(waiting.pop(query))))
            elif query in self._cold:
                del waiting[query]
            elif self._breakers[query].state(now) == OPEN:
                self.publisher.drop(query, self.mailboxes.take(query, len(waiting.pop(query))), PAUSED)
        resident, resident_bytes = self.device.resident_groups()
        return SchedulerState(now, waiting, resident, resident_bytes, self._policy_state, self._urgency())

    def _decide(self, state: SchedulerState) -> Decision | None:
        """The policy's decision; None while the policy pauses after it failed."""
        if state.now < self._decide_at:
            return None
        self.activity = Activity.expecting("a decision", 0.0)
        try:
            decision = self.policy.decide(state, self.costs, self._plan)
        except Exception as error:
            self._pause_policy(state.now, error)
            return None
        if self._policy_failures:
            log.info("the policy %s decides again", self.policy.name)
            self._policy_failures = 0
        return decision

    def _pause_policy(self, now: float, error: Exception) -> None:
        text = one_line(f"{type(error).__name__}: {error}")
        self._policy_failures += 1
        if self._policy_failures >= MAX_POLICY_FAILURES:
            problem = f"the policy {self.policy.name} failed {self._policy_failures} times in a row: {text}"
            raise PolicyFailed(problem) from error
        if self._policy_failures == 1:
            log.exception("the policy %s failed: %s", self.policy.name, text)
        self._policy_state = None
        self._decide_at = self._wake_s = now + POLICY_PAUSES.wait_s(self._policy_failures, 0.0)

    def _apply(self, state: SchedulerState, decision: Decision) -> bool:
        """Drop, load and run as decided; whether there was anything to load or run."""
        budget_bytes = self.device.budget_bytes
        self._policy_state, self._wake_s = decision.policy_state, decision.wake_s
        for query, captured_at, reason in decision.drop:
            self.mailboxes.drop(query, captured_at, reason)
            if reason == DEADLINE:
                self._estimates.lower_run_s(query)
        timing = TurnTiming()
        if decision.query:
            timing = self._take_turn(decision, decision.query)
            self._on_turn(decision.query, timing)
        if self._trace is not None:
            self._trace.step(state, decision, budget_bytes, timing.load_s, timing.moved_bytes, timing.run_s)
        return decision.query is not None

    def _take_turn(self, decision: Decision, query: str) -> TurnTiming:
        runs = decision.runs or ((query, 0),)
        expected_s = self.costs.load_s(self.costs.moved_bytes(decision.load))
        expected_s += run_seconds(self.costs, decision.runs or ((query, 1),))
        self.activity = Activity.expecting(f"query {', '.join(name for name, _ in runs)}", expected_s)
        starts_early = decision.count > 0 and not decision.also and self.device.starts_early(query)
        arena = self.device.arena
        bytes_before, load_s_before, start = arena.bytes_moved, arena.load_s, self.clock()
        try:
            self.device.load(runs, decision.evict, bool(decision.load), starts_early)
        except Exception as error:
            for name, count in runs:
                self._record_failure(name, self.mailboxes.take(name, count), error)
            return TurnTiming()
        loaded = self.clock()
        has_run = decision.count > 0 and (self._run_joint(decision) if decision.also else self._run(query, decision))
        finished = self.clock()
        load_s = arena.load_s - load_s_before if starts_early else loaded - start
        moved = arena.bytes_moved - bytes_before
        self._estimates.record_load(query, moved, load_s)
        run_s = finished - loaded if has_run and not (starts_early and moved) else None
        if run_s is not None and decision.also:
            self._estimates.record_joint(query, sum(count for _, count in runs), run_s)
        elif run_s is not None:
            self._estimates.record_run(query, decision.count, run_s)
        return TurnTiming(load_s, moved, run_s)

    def _run(self, query: str, decision: Decision) -> bool:
        """Run the oldest waiting frames in one batch and publish the results; False where that failed."""
        frames = self.mailboxes.take(query, decision.count)
        images = [frame.image for frame in frames if frame.image is not None]
        if not frames or len(images) < len(frames):
            return False
        try:
            predictions = self.device.run(query, images, lambda: self._prefetch_next(decision))
        except Exception as error:
            self._record_failure(query, frames, error)
            return False
        return self._publish(query, frames, predictions)

    def _run_joint(self, decision: Decision) -> bool:
        """The same for several queries in one pass; False where any of them failed, which leaves the others' results.

        A run whose time says nothing of the next one counts as failed, too.
        """
        frames = {query: self.mailboxes.take(query, count) for query, count in decision.runs}
        images = {
            query: [frame.image for frame in own if frame.image is not None] for query, own in frames.items() if own
        }
        if not images:
            return False
        try:
            found = self.device.run_joint(images, lambda: self._prefetch_next(decision))
        except Exception as error:
            for query, own in frames.items():
                self._record_failure(query, own, error)
            return False
        self.joint.add(len(images), sum(map(len, images.values())))
        has_run = len(images) == len(decision.runs)
        for query, own in frames.items():
            predictions = found.get(query, [])
            if isinstance(predictions, Exception):
                self._record_failure(query, own, predictions)
                has_run = False
            else:
                has_run = self._publish(query, own, predictions) and has_run
        return has_run

    def _publish(self, query: str, frames: Sequence[Frame], predictions: Sequence[Prediction]) -> bool:
        try:
            self.publisher.publish(query, frames, predictions, self.clock())
        except Exception as error:
            self._record_failure(query, frames, error)
            return False
        if self._breakers[query].record_success():
            log.info("query %s runs again", query)
        return True

    def _record_failure(self, query: str, frames: Sequence[Frame], error: Exception) -> None:
        self.device.refresh_resident()
        self.publisher.fail(query, frames, error)
        breaker, now = self._breakers[query], self.clock()
        was_closed = breaker.state(now) == CLOSED
        breaker.record_failure(now)
        if was_closed and breaker.state(now) == OPEN:
            log.error("query %s pauses after %d failures in a row; it will be retried", query, MAX_QUERY_FAILURES)

    def _prefetch_next(self, decision: Decision) -> None:
        """Begin the load that the schedule would make after the present run, if there is memory beside it."""
        present, running = self._snapshot(), {query for query, _ in decision.runs}
        waiting = {other: captured for other, captured in present.waiting.items() if other not in running}
        now = present.now + run_seconds(self.costs, decision.runs)
        following = self.policy.decide(replace(present, now=now, waiting=waiting), self.costs, self._plan)
        if following.query is not None and following.load:
            self.device.prefetch(following.load, following.evict)
