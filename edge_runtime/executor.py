"""The breaker of a query: one that fails again and again pauses, so that the others have its time.

Pure: no clock, no thread. Closed: it runs. Open: it pauses, the longer the more often it had to. Half-open: the pause
is over, and its next run decides.

The warm-up: every query is loaded and run on a frame of its camera, to learn what loads and runs cost.

The watchdog: whether a step of the inference hangs.

Pure: what is being done and the time are passed in. A process that was stopped or a machine that slept is not taken
for a step that hangs: of the time between two looks only so much counts as they should be apart.

The executor: one thread that asks the schedule what to do, does it on the device, and measures what it cost.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_runtime.backoff import BackOff
from edge_runtime.device import Device
from edge_runtime.queues import DEADLINE, PAUSED, Frame, Mailboxes
from edge_runtime.results import Publisher
from edge_runtime.scheduler import Decision, Plan, Policy, QuerySpec, SchedulerState
from edge_runtime.scheduler.costs import CostEstimates, Costs
from edge_runtime.scheduler.eviction import pick_evictions
from edge_runtime.simulation.trace import TraceWriter
from models.errors import one_line

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MAX_FAILURES = 3
"""Failures in a row after which a query pauses."""
PAUSES = BackOff(1.0, 60.0, spread=0.25)


class Breaker:
    """One query's. `chance` gives random numbers in [0, 1)."""

    def __init__(self, pauses: BackOff = PAUSES, chance: Callable[[], float] = random.random) -> None:
        self._pauses, self._chance = pauses, chance
        self._failures = self._trips = 0
        self._until = -math.inf

    def state(self, now: float) -> str:
        """Closed, open or half-open at this moment."""
        if not self._trips:
            return CLOSED
        return OPEN if now < self._until else HALF_OPEN

    def until(self, now: float) -> float | None:
        """When the pause is over; None where there is none."""
        return self._until if self.state(now) == OPEN else None

    def failed(self, now: float) -> float | None:
        """A run failed: the seconds for which the query now pauses, if it does."""
        self._failures += 1
        if not self._trips and self._failures < MAX_FAILURES:
            return None
        self._trips += 1
        pause_s = self._pauses.wait_s(self._trips, self._chance())
        self._until = now + pause_s
        return pause_s

    def ran(self) -> bool:
        """A run went well; whether that ends a time of pauses."""
        recovered = self._trips > 0
        self._failures = self._trips = 0
        return recovered


# The first run of a model pays for what is set up once; the best of the others counts.
WARM_UP_RUNS = 3


@dataclass(frozen=True)
class WarmUp:
    """Seconds of a run of one frame by query, the rate of loading (None if nothing was), and what failed."""

    run_s: Mapping[str, float]
    copy_bytes_per_s: float | None
    failed: Mapping[str, Exception]


def warm_up_steps(
    device: Device, plan: Plan, queries: Collection[str], frames: Mapping[str, np.ndarray], clock: Callable[[], float]
) -> Generator[None, None, WarmUp]:
    """Load and run these queries in the plan's order on `frames` (RGB uint8, H, W, 3), a run at a time.

    What others do between two steps may send away what was loaded: it is brought again where that is so.
    """
    moved = seconds = 0.0
    best: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for query in [query for query in plan.order if query in queries]:
        runs: list[float] = []
        try:
            while len(runs) < WARM_UP_RUNS:
                if not runs or not device.is_resident(query):
                    start, before = clock(), device.arena.bytes_moved
                    _first_load(device, query, plan)
                    seconds += clock() - start
                    moved += device.arena.bytes_moved - before
                runs.append(_timed(device, query, frames[query], clock))
                yield
        except Exception as error:
            failed[query] = error
            continue
        best[query] = min(runs[1:])
    return WarmUp(best, moved / seconds if moved and seconds > 0 else None, failed)


def _first_load(device: Device, query: str, plan: Plan) -> None:
    """A load before anything is known but sizes."""
    held, held_bytes = device.held()
    missing = tuple(piece for piece in device.costs.queries[query].tensors if piece not in held)
    state = SchedulerState(0.0, {}, held, held_bytes)
    now = replace(plan, budget_bytes=device.budget_bytes)  # less, where the device had no memory left
    evict = pick_evictions(state, device.costs, now, query, missing, 1)
    device.load(query, 0, evict or (), bool(missing))


def _timed(device: Device, query: str, image: np.ndarray, clock: Callable[[], float]) -> float:
    start = clock()
    device.run(query, [image])
    return clock() - start


MIN_HANG_S = 6.0
"""No step hangs that has not lasted so long."""
HANG_FACTOR = 10.0
"""A step hangs that lasts so many times as long as it is believed to."""
WATCH_INTERVAL_S = 0.2
"""How long it is from one look to the next, as a rule."""
MAX_GAP_S = 5 * WATCH_INTERVAL_S


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """One step, known by its identity: what it is, in words, and how many seconds it may last."""

    what: str
    most_s: float

    @classmethod
    def of(cls, what: str, believed_s: float) -> Activity:
        """A step that is believed to take so long."""
        return cls(what, max(MIN_HANG_S, HANG_FACTOR * believed_s))


class Watchdog:
    """Looks at what is being done, again and again."""

    def __init__(self) -> None:
        self._doing: Activity | None = None
        self._looked_at = 0.0
        self._lasts_s = 0.0

    def looks(self, doing: Activity | None, now: float) -> str | None:
        """What hangs, in words; None while all is well."""
        if doing is not self._doing:
            self._doing, self._lasts_s = doing, 0.0
        else:
            self._lasts_s += min(MAX_GAP_S, now - self._looked_at)
        self._looked_at = now
        if doing is None or self._lasts_s <= doing.most_s:
            return None
        return f"{doing.what} has not ended for {self._lasts_s:.1f} s"


IDLE_S = 0.1
MIN_SLEEP_S = 0.001
WARM_UP_S = 120.0
"""How long the warm-up of one query may last, which may compile what it runs."""
POLICY_PAUSES = BackOff(0.1, 2.0, spread=0.0)
MAX_POLICY_FAILURES = 10

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """What a turn took, as far as it could be measured: seconds and bytes of its load, seconds of its run."""

    load_s: float | None = None
    moved_bytes: int = 0
    run_s: float | None = None


def _unheard(query: str, turn: TurnTiming) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, eq=False)
class ExecutorParts:
    """What an executor is made of.

    `policy` plans for the `demands` from what the warm-up measures; `urgency` says what stale results cost at the
    moment; `took` hears of every turn. Seconds are those of `clock`, by which
    frames were captured, too.
    """

    device: Device
    policy: Policy
    demands: Mapping[str, QuerySpec]
    mailboxes: Mailboxes
    publisher: Publisher
    urgency: Callable[[], Mapping[str, float]] = dict
    trace: TraceWriter | None = None
    took: Callable[[str, TurnTiming], None] = _unheard
    clock: Callable[[], float] = time.monotonic


class PolicyFailed(Exception):
    """The policy raised again and again, so that nothing can be decided any more."""


class Executor:
    """Runs the queries of a bundle over the frames in the mailboxes, by the schedule, within the budget.

    The costs known at the start are corrected with every load and run. Where loads overlap runs (`Device.overlaps`),
    layers start as they arrive, and what the schedule would load next is loaded beside the present run. A query whose
    runs fail pauses (`Breaker`); a policy that raises is asked again after a while, without what it remembered. Call it
    from one thread; `doing` may be read from any.
    """

    def __init__(self, parts: ExecutorParts) -> None:
        self.parts, self.device, self.publisher = parts, parts.device, parts.publisher
        self.clock = parts.clock
        self.doing: Activity | None = None
        self._breakers = {query: Breaker() for query in parts.device.engines}
        self._wake_s: float | None = None
        self._policy_failures, self._ask_at = 0, -math.inf
        self._warming: Generator[None, None, WarmUp] | None = None
        self._cold: frozenset[str] = frozenset()
        self._begin(parts.device.costs)

    def _begin(self, costs: Costs) -> None:
        self._estimates = CostEstimates(costs)
        self._planned = self._plan_anew()
        self._policy_state: Any = None

    @property
    def costs(self) -> Costs:
        """What the box believes that things cost, over pieces of tensors (`Pieces`)."""
        return self._estimates.costs

    @property
    def order(self) -> tuple[str, ...]:
        """The cyclic order of the plan."""
        return self._plan.order

    @property
    def _plan(self) -> Plan:
        """The plan, made anew where the device has less memory than it was made for."""
        if self._planned.budget_bytes != self.device.budget_bytes:
            self._planned = self._plan_anew()
        return self._planned

    def _plan_anew(self) -> Plan:
        return self.parts.policy.plan(self.costs, self.parts.demands, self.device.budget_bytes)

    def warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        """Load and run every query on a frame of its camera, to learn what loads and runs cost; then plan.

        A query that fails here is out: the others run without it.
        """
        self.begin_warm_up(frames, self.device.engines)
        while self.warm():
            pass

    def begin_warm_up(self, frames: Mapping[str, np.ndarray], queries: Collection[str]) -> None:
        """Let `warm` do the same for these queries, a run at a time; until it is done they take no frames."""
        self._cold = frozenset(queries) - self.publisher.out
        self._warming = warm_up_steps(self.device, self._plan, self._cold, frames, self.clock)

    def warm(self) -> bool:
        """One run of the warm-up; False where there is none."""
        if self._warming is None:
            return False
        self.doing = Activity("the warm-up", WARM_UP_S)
        try:
            next(self._warming)
        except StopIteration as end:
            self._warming, self._cold = None, frozenset()
            self._learn(end.value)
        finally:
            self.doing = None
        return True

    @property
    def cold(self) -> frozenset[str]:
        """The queries that are not warmed up yet, or could not be."""
        return self._cold | self.publisher.out

    def follow(self, before: Executor, same: Collection[str]) -> None:
        """Go on where another executor ends: these queries are as they were, and pause where they paused."""
        self._breakers.update({query: before._breakers[query] for query in same if query in before._breakers})

    def believe(self, before: Executor, alike: Collection[str]) -> None:
        """Take over what another executor has learned: these queries run as long as they did."""
        run_s = {query: before.costs.queries[query].run_s for query in alike}
        self._estimates.set_measured(run_s, before.costs.copy_bytes_per_s)
        self._planned = self._plan_anew()

    def _learn(self, found: WarmUp) -> None:
        for query, error in found.failed.items():
            self.publisher.give_up(query, error)
        self._estimates.set_measured(found.run_s, found.copy_bytes_per_s or self.costs.copy_bytes_per_s)
        for query, run_s in found.run_s.items():
            if run_s > self.costs.queries[query].sla_s:
                log.warning(
                    "query %s takes %.0f ms a frame, its SLA is %.0f ms: its frames will be dropped",
                    query,
                    1000 * run_s,
                    1000 * self.costs.queries[query].sla_s,
                )
        self._planned = self._plan_anew()
        if self.parts.trace is not None:
            self.parts.trace.begin(
                self.parts.policy.name,
                self.costs,
                self._estimates.best_s,
                self.parts.demands,
                self.device.budget_bytes,
                self.device.held()[0],
            )

    def step(self) -> bool:
        """Carry out one decision; False when there was nothing to load or run. Raises PolicyFailed."""
        try:
            return self._step()
        finally:
            self.doing = None

    def sleep_s(self) -> float:
        """After a step that did nothing: how long nothing will be to do unless a frame comes."""
        until_s = IDLE_S if self._wake_s is None else self._wake_s - self.clock()
        return min(IDLE_S, max(MIN_SLEEP_S, until_s))

    def _step(self) -> bool:
        state = self._state()
        self._wake_s = None
        if state.now < self._ask_at:
            self._wake_s = self._ask_at
            return False
        self.doing = Activity.of("a decision", 0.0)
        decision, budget_bytes = self._decided(state), self.device.budget_bytes
        self._policy_state, self._wake_s = decision.policy_state, decision.wake_s
        for query, captured_at, reason in decision.drop:
            self.parts.mailboxes.drop(query, captured_at, reason)
            if reason == DEADLINE:
                self._estimates.lower_run_s(query)
        turn = TurnTiming()
        if decision.query:
            turn = self._take_turn(decision, decision.query)
            self.parts.took(decision.query, turn)
        if self.parts.trace is not None:
            self.parts.trace.step(state, decision, budget_bytes, turn.load_s, turn.moved_bytes, turn.run_s)
        return decision.query is not None

    def to_json(self) -> list[dict[str, Any]]:
        """Per query: measured run time, 95th percentile of its results' ages, its last failure if any."""
        return [
            {
                "id": query,
                "run_ms": round(1000 * self.costs.queries[query].run_s, 3),
                "age_p95_ms": self.publisher.age_p95_ms(query),
                "last_failure": self.publisher.failures.get(query),
                "breaker": self._breakers[query].state(self.clock()),
            }
            for query in self.device.engines
        ]

    def _state(self) -> SchedulerState:
        """The present one; the frames of queries that cannot run fail here."""
        now, waiting = self.parts.mailboxes.snapshot(self.clock)
        for query in self._cold & waiting.keys():
            del waiting[query]
        for query in self.publisher.out & waiting.keys():
            self.publisher.failed(query, self.parts.mailboxes.take(query, len(waiting.pop(query))))
        for query in [query for query in waiting if self._breakers[query].state(now) == OPEN]:
            self.publisher.dropped(query, self.parts.mailboxes.take(query, len(waiting.pop(query))), PAUSED)
        held, held_bytes = self.device.held()
        return SchedulerState(now, waiting, held, held_bytes, self._policy_state, self.parts.urgency())

    def _decided(self, state: SchedulerState) -> Decision:
        """What the policy decides; nothing, for a while, where it raises."""
        try:
            decision = self._decide(state)
        except Exception as error:
            said = one_line(f"{type(error).__name__}: {error}")
            self._policy_failures += 1
            if self._policy_failures >= MAX_POLICY_FAILURES:
                fault = f"the policy {self.parts.policy.name} failed {self._policy_failures} times in a row: {said}"
                raise PolicyFailed(fault) from error
            self._ask_at = state.now + POLICY_PAUSES.wait_s(self._policy_failures, 0.0)
            if self._policy_failures == 1:
                log.exception("the policy %s failed: %s", self.parts.policy.name, said)
            return Decision(wake_s=self._ask_at)
        if self._policy_failures:
            log.info("the policy %s decides again", self.parts.policy.name)
            self._policy_failures = 0
        return decision

    def _decide(self, state: SchedulerState) -> Decision:
        return self.parts.policy.decide(state, self.costs, self._plan)

    def _take_turn(self, decision: Decision, query: str) -> TurnTiming:
        believed_s = self.costs.load_s(self.costs.moved_bytes(decision.load))
        self.doing = Activity.of(
            f"query {query}", believed_s + self.costs.queries[query].run_of(max(1, decision.count))
        )
        early = decision.count > 0 and self.device.starts_early(query)
        arena = self.device.arena
        before, load_before_s, start = arena.bytes_moved, arena.load_s, self.clock()
        try:
            self.device.load(query, decision.count, decision.evict, bool(decision.load), early)
        except Exception as error:
            self._failed(query, self.parts.mailboxes.take(query, decision.count), error)
            return TurnTiming()
        loaded = self.clock()
        ran = decision.count > 0 and self._run(query, decision)
        finished = self.clock()
        load_s = arena.load_s - load_before_s if early else loaded - start
        moved = arena.bytes_moved - before
        self._estimates.record_load(query, moved, load_s)
        run_s = finished - loaded if ran and not (early and moved) else None
        if run_s is not None:
            self._estimates.record_run(query, decision.count, run_s)
        return TurnTiming(load_s, moved, run_s)

    def _run(self, query: str, decision: Decision) -> bool:
        """Answer the oldest waiting frames together and publish them; a failure is counted, told once, and the box
        goes on.
        """
        frames = self.parts.mailboxes.take(query, decision.count)
        images = [frame.image for frame in frames if frame.image is not None]
        if not frames or len(images) < len(frames):
            return False
        try:
            answers = self.device.run(query, images, lambda: self._look_ahead(query, decision))
            self.publisher.publish(query, frames, answers, self.clock())
        except Exception as error:
            self._failed(query, frames, error)
            return False
        if self._breakers[query].ran():
            log.info("query %s runs again", query)
        return True

    def _failed(self, query: str, frames: Sequence[Frame], error: Exception) -> None:
        """These frames have no answer; a query that fails again and again pauses."""
        self.device.forget_held()
        self.publisher.failed(query, frames, error)
        was, pause_s = self._breakers[query].state(self.clock()), self._breakers[query].failed(self.clock())
        if was == CLOSED and pause_s is not None:
            log.error("query %s pauses: it failed %d times in a row; it is tried again", query, MAX_FAILURES)

    def _look_ahead(self, query: str, decision: Decision) -> None:
        """Begin to load what the schedule would load once the present run is over, if there is room beside it."""
        present = self._state()
        waiting = {other: captured for other, captured in present.waiting.items() if other != query}
        now = present.now + self.costs.queries[query].run_of(decision.count)
        following = self._decide(
            SchedulerState(now, waiting, present.resident, present.resident_bytes, self._policy_state, present.urgency)
        )
        if following.query is not None and following.load:
            self.device.prefetch(following.load, following.evict)
