"""The executor: one thread that asks the schedule what to do, does it on the device, and measures what it cost."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edge_runtime.arena import Arena
from edge_runtime.costs import Costs
from edge_runtime.engine import Engine
from edge_runtime.faults import is_out_of_memory
from edge_runtime.ledger import Ledger
from edge_runtime.mailbox import Frame, Mailboxes
from edge_runtime.results import JsonLines, record_of
from edge_runtime.schedule import Decision, Situation, Turns, decide
from edge_runtime.simulator import age_p95_ms

# Weight of the newest measurement in a running average of costs.
NEWEST_SHARE = 0.2
# How much a run time is lowered for each frame that it cost.
DOUBT_SHARE = 0.05
# Loads smaller than this say more about the latency than about the rate of copying.
RATE_FROM_BYTES = 2**20
AGES_KEPT = 10_000
# The first run of a model pays for what is set up once; the best of the others counts.
WARM_UP_RUNS = 3
# How much less memory the runtime asks for once the device had none left: the failed query's workspace, or this.
LEAST_CUT_SHARE = 1 / 16

Result = TypeVar("Result")

log = logging.getLogger("gemel.run")


class Executor:
    """Runs the queries of a bundle over the frames in the mailboxes, by the schedule, within the budget.

    `costs` are the costs known at the start and are corrected with every load and run; `digest` is the bundle's and
    goes into every result. `damaged` are queries that cannot run, with the reason: their frames count as failed.
    Where loads overlap runs (`Mover.overlaps`), layers start as they arrive, and what the schedule would load next
    is loaded beside the present run. Call it from one thread.
    """

    def __init__(self, arena: Arena, engines: Mapping[str, Engine], costs: Costs, budget_bytes: int,
                 order: Sequence[str], mailboxes: Mailboxes, ledger: Ledger, sinks: Sequence[JsonLines], digest: str,
                 clock: Callable[[], float] = time.monotonic, damaged: Mapping[str, str] | None = None) -> None:
        self.arena, self.engines, self.costs, self.budget_bytes, self.order = arena, engines, costs, budget_bytes, order
        self.mailboxes, self.ledger, self.sinks, self.clock = mailboxes, ledger, sinks, clock
        self.max_used_bytes = 0
        self._digest = digest
        self._turns = Turns()
        self._best: dict[str, float] = {}
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in engines}
        self._failures: dict[str, str] = dict(damaged or {})
        self._out = set(self._failures)

    def warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        """Load and run every query on a frame of its camera, to learn what loads and runs cost.

        A query that fails here is out: the others run without it.
        """
        moved = seconds = 0.0
        for query in self.order:
            if query in self._out:
                continue
            situation = Situation(0.0, {query: math.inf}, self.arena.residency.resident, self._turns)
            decision = self._decide(situation)
            start, before = self.clock(), self.arena.bytes_moved
            try:
                self._load(decision, query)
                seconds += self.clock() - start
                moved += self.arena.bytes_moved - before
                runs = [self._timed(query, frames[query]) for _ in range(WARM_UP_RUNS)]
            except Exception as error:
                self._tell(query, error)
                self._out.add(query)
                continue
            self._best[query] = min(runs[1:])
            self._turns = self._turns.after(decision)
        rate = moved / seconds if moved and seconds > 0 else self.costs.copy_bytes_per_s
        for query, run_s in self._best.items():
            self.costs = self.costs.with_measured(query, run_s, rate)
            if run_s > self.costs.queries[query].sla_s:
                log.warning("query %s takes %.0f ms a frame, its SLA is %.0f ms: its frames will be dropped",
                            query, 1000 * run_s, 1000 * self.costs.queries[query].sla_s)

    def step(self) -> bool:
        """Carry out one decision; False when there was nothing to load or run."""
        pending = self._pending()
        decision = self._decide(Situation(self.clock(), pending, self.arena.residency.resident, self._turns))
        for query, reason in decision.drop:
            self.mailboxes.drop(query, pending[query], reason)
            self._doubt(query)
        if decision.turn is not None:
            self._take_turn(decision, decision.turn)
        self._turns = self._turns.after(decision)
        return decision.turn is not None

    def to_json(self) -> list[dict[str, Any]]:
        """Per query: measured run time, 95th percentile of its results' ages, its last failure if any."""
        return [{"id": query, "run_ms": round(1000 * self.costs.queries[query].run_s, 3),
                 "age_p95_ms": age_p95_ms(self._ages[query]), "last_failure": self._failures.get(query)}
                for query in self.engines]

    def _pending(self) -> dict[str, float]:
        """What waits for queries that can run; the frames of the others fail here."""
        pending = self.mailboxes.pending()
        for query in self._out & pending.keys():
            if self.mailboxes.take(query) is not None:
                self.ledger.failed(query)
            del pending[query]
        return pending

    def _decide(self, situation: Situation) -> Decision:
        return decide(situation, self.costs, self.budget_bytes, self.order)

    def _take_turn(self, decision: Decision, query: str) -> None:
        run_s, copy_rate = self.costs.queries[query].run_s, self.costs.copy_bytes_per_s
        streams = decision.run and self.arena.streams(self.engines[query])
        before, load_before_s, start = self.arena.bytes_moved, self.arena.load_s, self.clock()
        try:
            self._load(decision, query, streams)
        except Exception as error:
            self._fail(query, error, self.mailboxes.take(query) if decision.run else None)
            return
        loaded = self.clock()
        ran = decision.run and self._run(query, decision)
        finished = self.clock()
        load_s = self.arena.load_s - load_before_s if streams else loaded - start
        moved = self.arena.bytes_moved - before
        if moved >= RATE_FROM_BYTES and load_s > 0:
            copy_rate = _average(copy_rate, moved / load_s)
        if ran and not (streams and moved):
            run_s = _average(run_s, finished - loaded)
            self._best[query] = min(self._best.get(query, finished - loaded), finished - loaded)
        self.costs = self.costs.with_measured(query, run_s, copy_rate)

    def _doubt(self, query: str) -> None:
        """Lower a run time that cost a frame a little: to the best one seen, or into the SLA if even that is above.

        A query believed too slow is not run, and what is not run is not measured: a stall, during the warm-up too,
        must not be for ever. A query that is too slow indeed is tried again from time to time, and publishes late.
        """
        cost = self.costs.queries[query]
        best = self._best.get(query, cost.run_s)
        target = min(cost.run_s, best if best <= cost.sla_s else cost.sla_s / 2)
        lower = _average(cost.run_s, target, DOUBT_SHARE)
        self.costs = self.costs.with_measured(query, lower, self.costs.copy_bytes_per_s)

    def _timed(self, query: str, image: np.ndarray) -> float:
        start = self.clock()
        self._answer(query, image)
        return self.clock() - start

    def _load(self, decision: Decision, query: str, streams: bool = False) -> None:
        """Make the query's tensors resident; where it `streams` they may still be arriving on return."""
        self._twice(query, lambda: self._bring(query, decision.evict, streams))
        used = self.arena.residency.resident_bytes + self.costs.queries[query].workspace_bytes
        self.max_used_bytes = max(self.max_used_bytes, used)

    def _bring(self, query: str, evict: Sequence[str], streams: bool) -> None:
        self.arena.start(self._names(query), self.costs.queries[query].workspace_bytes, evict, waits=not streams)
        if not streams:
            self.arena.finish(self._names(query))

    def _run(self, query: str, decision: Decision) -> bool:
        """Answer the newest frame and publish it; a failure is counted, told once, and the box goes on."""
        frame = self.mailboxes.take(query)
        if frame is None or frame.image is None:
            return False
        image = frame.image
        try:
            answer = self._twice(query, lambda: self._answer(query, image, decision))
            finished_at = self.clock()
            record = record_of(self.engines[query].query, frame, answer, finished_at, self._digest)
            for sink in self.sinks:
                sink.write(record)
        except Exception as error:
            self._fail(query, error, frame)
            return False
        self.ledger.processed(query, late=record["late"])
        self._ages[query].append(finished_at - frame.captured_at)
        return True

    def _answer(self, query: str, image: np.ndarray, decision: Decision | None = None) -> Any:
        """Run the query on a frame, once all it needs is resident or arriving; `decision` is what brought it here."""
        engine, names, workspace = self.engines[query], self._names(query), self.costs.queries[query].workspace_bytes
        residency = self.arena.residency
        self.arena.start(names, workspace, waits=not self.arena.streams(engine))
        residency.hold(names, workspace)
        try:
            self.arena.bind(engine, names)
            if decision is not None and self.arena.mover.overlaps:
                self._look_ahead(query, decision)
            answer = engine.run([image])[0]
            self.arena.synchronise()
        finally:
            residency.release(names, workspace)
        self.arena.finish(names)
        return answer

    def _look_ahead(self, query: str, decision: Decision) -> None:
        """Begin to load what the schedule would load once the present run is over, if there is room beside it."""
        now = self.clock() + self.costs.queries[query].run_s
        pending = self._pending()
        pending.pop(query, None)
        turns = self._turns.after(decision)
        following = self._decide(Situation(now, pending, self.arena.residency.resident, turns))
        if following.turn is not None and following.load:
            self.arena.prefetch(following.load, following.evict)

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
        log.warning("out of memory at query %s (%s): everything is evicted, the budget is now %d bytes",
                    query, told, self.budget_bytes)
        for engine in self.engines.values():
            engine.unbind()
        self.arena.resize(arena_bytes(self.costs, self.budget_bytes), self.budget_bytes)

    def _names(self, query: str) -> tuple[str, ...]:
        return self.costs.queries[query].tensors

    def _fail(self, query: str, error: Exception, frame: Frame | None) -> None:
        if frame is not None:
            self.ledger.failed(query)
        self._tell(query, error)

    def _tell(self, query: str, error: Exception) -> None:
        """Remember why a query failed; say it once."""
        text = f"{type(error).__name__}: {error}"
        if self._failures.get(query) != text:
            log.error("query %s failed on a frame: %s", query, text)
        self._failures[query] = text


def _average(known: float, measured: float, share: float = NEWEST_SHARE) -> float:
    return known + share * (measured - known)


def unfit(costs: Costs, budget_bytes: int) -> list[str]:
    """The queries that could not run even alone within the budget."""
    return [query for query in costs.queries if costs.alone_bytes(query) > budget_bytes]


def arena_bytes(costs: Costs, budget_bytes: int) -> int:
    """Room for all weights, or for as many as the budget leaves beside the smallest workspace.

    A query with a larger workspace runs with less resident; residency sees to that. The arena keeps its size all
    the same, so the process can hold more than the budget by up to the difference between the workspaces.
    """
    smallest = min(cost.workspace_bytes for cost in costs.queries.values())
    return min(costs.resident_bytes(costs.tensor_bytes.keys()), budget_bytes - smallest)
