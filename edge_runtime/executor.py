"""The executor: one thread that asks the schedule what to do, does it on the device, and measures what it cost."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.arena import Arena
from edge_runtime.costs import Costs
from edge_runtime.engine import Engine
from edge_runtime.ledger import Ledger
from edge_runtime.mailbox import Mailboxes
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

log = logging.getLogger("gemel.run")


class Executor:
    """Runs the queries of a bundle over the frames in the mailboxes, by the schedule, within the budget.

    `costs` are the costs known at the start and are corrected with every load and run; `digest` is the bundle's and
    goes into every result. Call it from one thread.
    """

    def __init__(self, arena: Arena, engines: Mapping[str, Engine], costs: Costs, budget_bytes: int,
                 order: Sequence[str], mailboxes: Mailboxes, ledger: Ledger, sinks: Sequence[JsonLines], digest: str,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.arena, self.engines, self.costs, self.budget_bytes, self.order = arena, engines, costs, budget_bytes, order
        self.mailboxes, self.ledger, self.sinks, self.clock = mailboxes, ledger, sinks, clock
        self.max_used_bytes = 0
        self._digest = digest
        self._turns = Turns()
        self._best: dict[str, float] = {}
        self._ages = {query: deque[float](maxlen=AGES_KEPT) for query in engines}
        self._failures: dict[str, str] = {}

    def warm_up(self, frames: Mapping[str, np.ndarray]) -> None:
        """Load and run every query on a frame of its camera, to learn what loads and runs cost."""
        moved = seconds = 0.0
        for query in self.order:
            situation = Situation(0.0, {query: math.inf}, self.arena.residency.resident, self._turns)
            decision = decide(situation, self.costs, self.budget_bytes, self.order)
            seconds -= self.clock()
            moved += self._load(decision, query)
            seconds += self.clock()
            runs = [self._timed(query, frames[query]) for _ in range(WARM_UP_RUNS)]
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
        pending = self.mailboxes.pending()
        situation = Situation(self.clock(), pending, self.arena.residency.resident, self._turns)
        decision = decide(situation, self.costs, self.budget_bytes, self.order)
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

    def _take_turn(self, decision: Decision, query: str) -> None:
        run_s, copy_rate = self.costs.queries[query].run_s, self.costs.copy_bytes_per_s
        start = self.clock()
        moved = self._load(decision, query)
        loaded = self.clock()
        if moved >= RATE_FROM_BYTES and loaded > start:
            copy_rate = _average(copy_rate, moved / (loaded - start))
        if decision.run and self._run(query):
            measured = self.clock() - loaded
            run_s = _average(run_s, measured)
            self._best[query] = min(self._best.get(query, measured), measured)
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

    def _load(self, decision: Decision, query: str) -> int:
        moved = self.arena.change(decision.evict, decision.load) if decision.evict or decision.load else 0
        used = self.arena.residency.resident_bytes + self.costs.queries[query].workspace_bytes
        self.max_used_bytes = max(self.max_used_bytes, used)
        return moved

    def _run(self, query: str) -> bool:
        """Answer the newest frame and publish it; a failure is counted, told once, and the box goes on."""
        frame = self.mailboxes.take(query)
        if frame is None or frame.image is None:
            return False
        try:
            answer = self._answer(query, frame.image)
            finished_at = self.clock()
            record = record_of(self.engines[query].query, frame, answer, finished_at, self._digest)
            for sink in self.sinks:
                sink.write(record)
        except Exception as error:
            self._fail(query, error)
            return False
        self.ledger.processed(query, late=record["late"])
        self._ages[query].append(finished_at - frame.captured_at)
        return True

    def _answer(self, query: str, image: np.ndarray) -> Any:
        engine, names = self.engines[query], self.costs.queries[query].tensors
        self.arena.residency.hold(names)
        try:
            engine.bind(self.arena.tensor)
            answer = engine.run([image])[0]
            self.arena.synchronise()
        finally:
            self.arena.residency.release(names)
        return answer

    def _fail(self, query: str, error: Exception) -> None:
        self.ledger.failed(query)
        text = f"{type(error).__name__}: {error}"
        if self._failures.get(query) != text:
            log.error("query %s failed on a frame: %s", query, text)
        self._failures[query] = text


def _average(known: float, measured: float, share: float = NEWEST_SHARE) -> float:
    return known + share * (measured - known)


def unfit(costs: Costs, budget_bytes: int) -> list[str]:
    """The queries that could not run even alone within the budget."""
    return [query for query in costs.queries if costs.alone_bytes(query) > budget_bytes]
