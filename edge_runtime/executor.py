"""The executor: one thread that asks the schedule what to do, does it on the device, and measures what it cost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edge_runtime.engines import Engine
from edge_runtime.frames.ledger import DEADLINE, Ledger
from edge_runtime.frames.mailbox import Frame, Mailboxes
from edge_runtime.frames.results import record_of
from edge_runtime.frames.sinks.base import Sink
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.faults import is_out_of_memory
from edge_runtime.rehearsal.simulator import age_p95_ms
from edge_runtime.rehearsal.trace import TraceWriter
from edge_runtime.schedule import Decision, Demand, Policy, Situation
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.estimates import Estimates
from edge_runtime.schedule.pieces import pieces_of
from edge_runtime.schedule.room import room_for

AGES_KEPT = 10_000
# The first run of a model pays for what is set up once; the best of the others counts.
WARM_UP_RUNS = 3
# How much less memory the runtime asks for once the device had none left: the failed query's workspace, or this.
LEAST_CUT_SHARE = 1 / 16

Result = TypeVar("Result")

log = logging.getLogger("gemel.run")


class Executor:
    """Runs the queries of a bundle over the frames in the mailboxes, by the schedule, within the budget.

    `costs` are the costs known at the start and are corrected with every load and run; from them, once the warm-up
    has measured, `policy` plans. `urgency` says what stale results cost at the moment. `digest` is the bundle's and
    goes into every result. `damaged` are queries that cannot run, with the reason: their frames count as failed.
    Where loads overlap runs (`Mover.overlaps`), layers start as they arrive, and what the schedule would load next
    is loaded beside the present run. Call it from one thread.
    """

    def __init__(
        self,
        arena: Arena,
        engines: Mapping[str, Engine],
        costs: Costs,
        budget_bytes: int,
        policy: Policy,
        demands: Mapping[str, Demand],
        mailboxes: Mailboxes,
        ledger: Ledger,
        sinks: Sequence[Sink],
        digest: str,
        clock: Callable[[], float] = time.monotonic,
        damaged: Mapping[str, str] | None = None,
        urgency: Callable[[], Mapping[str, float]] = dict,
        trace: TraceWriter | None = None,
    ) -> None:
        self.arena, self.engines, self.budget_bytes = arena, engines, budget_bytes
        self.policy, self.demands = policy, demands
        self.mailboxes, self.ledger, self.sinks, self.clock = mailboxes, ledger, sinks, clock
        self.max_used_bytes = 0
        self._digest = digest
        self._urgency, self._trace = urgency, trace
        self._tensors = {query: cost.tensors for query, cost in costs.queries.items()}
        self._pieces = pieces_of(costs)
        self._held: frozenset[str] | None = None
        self._held_bytes = 0
        self._loose: frozenset[str] = frozenset()
        self._estimates = Estimates(self._pieces.costs)
        self._plan = policy.plan(self.costs, demands, budget_bytes)
        self._recall: Any = None
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in engines}
        self._failures: dict[str, str] = dict(damaged or {})
        self._out = set(self._failures)

    @property
    def costs(self) -> Costs:
        """What the box believes that things cost, over pieces of tensors (`Pieces`)."""
        return self._estimates.costs

    @property
    def order(self) -> tuple[str, ...]:
        """The cyclic order of the plan."""
        return self._plan.order

    def warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        """Load and run every query on a frame of its camera, to learn what loads and runs cost; then plan.

        A query that fails here is out: the others run without it.
        """
        moved = seconds = 0.0
        best: dict[str, float] = {}
        for query in self.order:
            if query in self._out:
                continue
            start, before = self.clock(), self.arena.bytes_moved
            try:
                self._load(self._first_load(query))
                seconds += self.clock() - start
                moved += self.arena.bytes_moved - before
                runs = [self._timed(query, frames[query]) for _ in range(WARM_UP_RUNS)]
            except Exception as error:
                self._tell(query, error)
                self._out.add(query)
                continue
            best[query] = min(runs[1:])
        self._estimates.warmed(best, moved / seconds if moved and seconds > 0 else self.costs.copy_bytes_per_s)
        for query, run_s in best.items():
            if run_s > self.costs.queries[query].sla_s:
                log.warning(
                    "query %s takes %.0f ms a frame, its SLA is %.0f ms: its frames will be dropped",
                    query,
                    1000 * run_s,
                    1000 * self.costs.queries[query].sla_s,
                )
        self._plan = self.policy.plan(self.costs, self.demands, self.budget_bytes)
        if self._trace is not None:
            self._trace.begin(
                self.policy.name, self.costs, self._estimates.best_s, self.demands, self.budget_bytes, self._resident()
            )

    def step(self) -> bool:
        """Carry out one decision; False when there was nothing to load or run."""
        situation = self._situation()
        decision, budget_bytes = self._decide(situation), self.budget_bytes
        self._recall = decision.recall
        for query, captured_at, reason in decision.drop:
            self.mailboxes.drop(query, captured_at, reason)
            if reason == DEADLINE:
                self._estimates.doubt(query)
        load_s, moved_bytes, run_s = self._take_turn(decision, decision.turn) if decision.turn else (None, 0, None)
        if self._trace is not None:
            self._trace.step(situation, decision, budget_bytes, load_s, moved_bytes, run_s)
        return decision.turn is not None

    def to_json(self) -> list[dict[str, Any]]:
        """Per query: measured run time, 95th percentile of its results' ages, its last failure if any."""
        return [
            {
                "id": query,
                "run_ms": round(1000 * self.costs.queries[query].run_s, 3),
                "age_p95_ms": age_p95_ms(self._ages[query]),
                "last_failure": self._failures.get(query),
            }
            for query in self.engines
        ]

    def _situation(self) -> Situation:
        """The present one; the frames of queries that cannot run fail here."""
        now, waiting = self.mailboxes.snapshot(self.clock)
        for query in self._out & waiting.keys():
            for _ in self.mailboxes.take(query, len(waiting.pop(query))):
                self.ledger.failed(query)
        held = self._resident()
        return Situation(now, waiting, held, self._held_bytes, self._recall, self._urgency())

    def _resident(self) -> frozenset[str]:
        """The pieces that are whole in memory; looked up anew only when something may have come or gone.

        Tensors of pieces that are not whole (after a load that failed) are noted, to be evicted with the next change.
        """
        if self._held is None:
            resident = self.arena.residency.resident
            self._held = self._pieces.held(resident)
            self._held_bytes = self.costs.resident_bytes(self._held)
            self._loose = resident.difference(self._pieces.names(self._held))
        return self._held

    def _decide(self, situation: Situation) -> Decision:
        return self.policy.decide(situation, self.costs, self._plan)

    def _first_load(self, query: str) -> Decision:
        """A load for the warm-up, before anything is known but sizes."""
        held, cost = self._resident(), self.costs.queries[query]
        missing = tuple(piece for piece in cost.tensors if piece not in held)
        situation = Situation(0.0, {}, held, self._held_bytes)
        evict = room_for(situation, self.costs, self._plan, query, missing, 1)
        return Decision(query, 0, evict or (), missing)

    def _take_turn(self, decision: Decision, query: str) -> tuple[float | None, int, float | None]:
        """Load and run; the seconds and bytes of the load and the seconds of the run, where they could be measured."""
        early = decision.count > 0 and self.arena.starts_early(self.engines[query])
        before, load_before_s, start = self.arena.bytes_moved, self.arena.load_s, self.clock()
        try:
            self._load(decision, early)
        except Exception as error:
            self._fail(query, error, self.mailboxes.take(query, decision.count))
            return None, 0, None
        loaded = self.clock()
        ran = decision.count > 0 and self._run(query, decision)
        finished = self.clock()
        load_s = self.arena.load_s - load_before_s if early else loaded - start
        moved = self.arena.bytes_moved - before
        self._estimates.loaded(query, moved, load_s)
        run_s = finished - loaded if ran and not (early and moved) else None
        if run_s is not None:
            self._estimates.ran(query, decision.count, run_s)
        return load_s, moved, run_s

    def _timed(self, query: str, image: np.ndarray) -> float:
        start = self.clock()
        self._answers(query, [image])
        return self.clock() - start

    def _load(self, decision: Decision, early: bool = False) -> None:
        """Bring what the decision asks for; where the query starts `early` it may still be arriving on return."""
        query = decision.turn
        assert query is not None
        workspace_bytes = self.costs.queries[query].workspace_of(max(1, decision.count))
        evict = (*self._pieces.names(decision.evict), *self._loose.difference(self._names(query)))
        try:
            self._twice(query, lambda: self._bring(query, workspace_bytes, evict, early))
        finally:
            if decision.load or evict:
                self._held = None
        self.max_used_bytes = max(self.max_used_bytes, self.arena.residency.resident_bytes + workspace_bytes)

    def _bring(self, query: str, workspace_bytes: int, evict: Sequence[str], early: bool) -> None:
        self.arena.start(self._names(query), workspace_bytes, evict, waits=not early)
        if not early:
            self.arena.finish(self._names(query))

    def _run(self, query: str, decision: Decision) -> bool:
        """Answer the oldest waiting frames together and publish them; a failure is counted, told once, and the box
        goes on.
        """
        frames = self.mailboxes.take(query, decision.count)
        images = [frame.image for frame in frames if frame.image is not None]
        if not frames or len(images) < len(frames):
            return False
        try:
            answers = self._twice(query, lambda: self._answers(query, images, decision))
            finished_at = self.clock()
            records = [
                record_of(self.engines[query].query, frame, answer, finished_at, self._digest)
                for frame, answer in zip(frames, answers, strict=True)
            ]
            for record in records:
                for sink in self.sinks:
                    sink.write(record)
        except Exception as error:
            self._fail(query, error, frames)
            return False
        for frame, record in zip(frames, records, strict=True):
            self.ledger.processed(query, late=record["late"])
            self._ages[query].append(finished_at - frame.captured_at)
        return True

    def _answers(self, query: str, images: Sequence[np.ndarray], decision: Decision | None = None) -> list[Any]:
        """Run the query on frames, once all it needs is resident or arriving; `decision` is what brought it here."""
        engine, names = self.engines[query], self._names(query)
        workspace = self.costs.queries[query].workspace_of(len(images))
        residency = self.arena.residency
        if self.arena.start(names, workspace, waits=not self.arena.starts_early(engine)):
            self._held = None
        residency.hold(names, workspace)
        try:
            self.arena.bind(engine, names)
            if decision is not None and self.arena.mover.overlaps:
                self._look_ahead(query, decision)
            answers = engine.run(images)
            self.arena.synchronise()
        finally:
            residency.release(names, workspace)
        self.arena.finish(names)
        return answers

    def _look_ahead(self, query: str, decision: Decision) -> None:
        """Begin to load what the schedule would load once the present run is over, if there is room beside it."""
        present = self._situation()
        waiting = {other: captured for other, captured in present.waiting.items() if other != query}
        now = present.now + self.costs.queries[query].run_of(decision.count)
        following = self._decide(
            Situation(now, waiting, present.resident, present.resident_bytes, self._recall, present.urgency)
        )
        if following.turn is not None and following.load:
            self._held = None
            self.arena.prefetch(self._pieces.names(following.load), self._pieces.names(following.evict))

    def _twice(self, query: str, attempt: Callable[[], Result]) -> Result:
        """Try; when the device has no memory left, make room and try once more."""
        try:
            return attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            told = f"{type(error).__name__}: {error}"
        # Not while the error is handled: its traceback keeps all that the failed run had allocated.
        self._make_way(query, told)
        return attempt()

    def _make_way(self, query: str, told: str) -> None:
        """Give all resident weights back to the device and ask for less from now on, never for too little."""
        cut = max(self.costs.queries[query].workspace_bytes, int(self.budget_bytes * LEAST_CUT_SHARE))
        least = max(map(self.costs.alone_bytes, self.costs.queries))
        self.budget_bytes = min(self.budget_bytes, max(least, self.budget_bytes - cut))
        log.warning(
            "out of memory at query %s (%s): everything is evicted, the budget is now %d bytes",
            query,
            told,
            self.budget_bytes,
        )
        for engine in self.engines.values():
            engine.unbind()
        self._held = None
        self.arena.resize(arena_bytes(self.costs, self.budget_bytes), self.budget_bytes)
        self._plan = self.policy.plan(self.costs, self.demands, self.budget_bytes)

    def _names(self, query: str) -> tuple[str, ...]:
        return self._tensors[query]

    def _fail(self, query: str, error: Exception, frames: Sequence[Frame]) -> None:
        self._held = None
        for _ in frames:
            self.ledger.failed(query)
        self._tell(query, error)

    def _tell(self, query: str, error: Exception) -> None:
        """Remember why a query failed; say it once."""
        text = f"{type(error).__name__}: {error}"
        if self._failures.get(query) != text:
            log.error("query %s failed on a frame: %s", query, text)
        self._failures[query] = text


def arena_bytes(costs: Costs, budget_bytes: int) -> int:
    """Room for all weights, or for as many as the budget leaves beside the smallest workspace.

    A query with a larger workspace runs with less resident; residency sees to that, and the arena's free pages go
    back to the system meanwhile. A card's memory is one piece: there the process holds more than the budget then, by
    up to the difference between the workspaces.
    """
    smallest = min(cost.workspace_bytes for cost in costs.queries.values())
    return min(costs.resident_bytes(costs.tensor_bytes.keys()), budget_bytes - smallest)
