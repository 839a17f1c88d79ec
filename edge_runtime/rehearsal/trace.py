"""Traces: what a box saw, decided and measured, as JSON lines that can be replayed (`edge_runtime.rehearsal.recorded`).

The first line holds the costs known at the start and all that the schedule was planned from. After it come, in the
order in which they happened, `{"frame": [query, captured_at, at]}` for every frame that arrived, and one object per
decision: `at` (when), `turn`, `count`, `load` and `evict` (numbers of tensors), `drop`, what the action took
(`load_s`, `moved_bytes`, `run_s`; null for what did not happen), `urgency`, `budget_bytes`, and `resident`: the
tensors that came or went otherwise than by the decisions so far (a prefetch, say). Seconds are those of the box's
own clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_runtime.schedule import Decision, Demand, Situation
from edge_runtime.schedule.costs import Costs
from models.errors import InputError
from models.io import Lines

FORMAT = 1
MAX_WAITING = 100_000
TIMEOUT_S = 1.0

log = logging.getLogger("gemel.run")


class TraceWriter:
    """Writes a trace as it happens, in a thread of its own; frames may be told from any thread, and nobody waits.

    A trace that cannot be written any more, as on a full disk, or as fast as it comes, ends there: `refused` says why,
    and the box goes on.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = Lines(Path(path), fresh=True, key="trace")
        self.refused: str | None = None
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        self._thread.start()
        self._numbers: dict[str, int] = {}
        self._resident: set[str] = set()

    def begin(
        self,
        policy: str,
        costs: Costs,
        best_s: Mapping[str, float],
        demands: Mapping[str, Demand],
        budget_bytes: int,
        resident: Set[str],
    ) -> None:
        """Write the first line."""
        # In the order of their names, by which the schedule breaks ties.
        self._numbers = {name: number for number, name in enumerate(sorted(costs.tensor_bytes))}
        self._resident = set(resident)
        self._write({
            "trace": FORMAT, "policy": policy, "budget_bytes": budget_bytes,
            "demands": {query: asdict(demand) for query, demand in demands.items()},
            "copy_bytes_per_s": costs.copy_bytes_per_s, "load_latency_s": costs.load_latency_s,
            "tensors": [[costs.tensor_bytes[name], costs.footprints[name]] for name in self._numbers],
            "queries": {query: {
                "tensors": self._of(cost.tensors), "run_s": cost.run_s, "workspace_bytes": cost.workspace_bytes,
                "sla_s": cost.sla_s, "larger": [asdict(batch) for batch in cost.larger], "best_s": best_s.get(query),
            } for query, cost in costs.queries.items()},
            "resident": self._of(sorted(resident)),
        })  # fmt: skip

    def frame(self, query: str, captured_at: float, at: float) -> None:
        """A frame arrived."""
        self._write({"frame": [query, captured_at, at]})

    def step(
        self,
        situation: Situation,
        decision: Decision,
        budget_bytes: int,
        load_s: float | None,
        moved_bytes: int,
        run_s: float | None,
    ) -> None:
        """A decision was made and carried out."""
        appeared, vanished = situation.resident - self._resident, self._resident - situation.resident
        self._resident = (set(situation.resident) - set(decision.evict)) | set(decision.load)
        self._write({
            "at": situation.now, "turn": decision.turn, "count": decision.count, "load": self._of(decision.load),
            "evict": self._of(decision.evict), "drop": [list(one) for one in decision.drop], "load_s": load_s,
            "moved_bytes": moved_bytes, "run_s": run_s, "budget_bytes": budget_bytes,
            "urgency": dict(situation.urgency), "resident": [self._of(sorted(appeared)), self._of(sorted(vanished))],
        })  # fmt: skip

    def close(self) -> None:
        """Write what waits, for a while at most, and let go of the file."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=TIMEOUT_S)
        self._thread.join(TIMEOUT_S)

    def _of(self, names: Any) -> list[int]:
        return [self._numbers[name] for name in names]

    def _write(self, line: dict[str, Any]) -> None:
        if self.refused is None:
            try:
                self._waiting.put_nowait(line)
            except queue.Full:
                self._end(f"{MAX_WAITING} lines of the trace wait to be written: the disk is too slow")

    def _work(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self.refused is not None:
                continue
            try:
                self._lines.add(json.dumps(line, separators=(",", ":")))
            except InputError as error:
                self._end(str(error))
        try:
            self._lines.close()
        except InputError as error:
            log.error("%s", error)

    def _end(self, why: str) -> None:
        self.refused = why
        log.error("the trace ends here: %s", why)
