"""Traces: what a box saw, decided and measured, written as JSON lines and read again for a replay.

The first line holds the costs known at the start and all that the schedule was planned from. After it come, in the
order in which they happened, `{"frame": [query, captured_at, at]}` for every frame that arrived, and one object per
decision: `at` (when), `query`, `count`, `also` (further queries of the run),
`load` and `evict` (numbers of tensors), `drop`, what the action took
(`load_s`, `moved_bytes`, `run_s`; null for what did not happen), `urgency`, `budget_bytes`, and `resident`: the
tensors that came or went otherwise than by the decisions so far (a prefetch, say). Seconds are those of the box's
own clock. Reading checks every line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gemel.edge_runtime.scheduler import Decision, QuerySpec, SchedulerState
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost
from gemel.edge_runtime.scheduler.types import MAX_AGES
from gemel.models.errors import InputError, one_line
from gemel.models.files.io import AppendFile, Exact, read_json_lines, validate

TRACE_FORMAT = 3
MAX_WAITING_LINES = 100_000
TIMEOUT_S = 1.0

log = logging.getLogger("gemel.run")


class TraceWriter:
    """Writes a trace as it happens, in a thread of its own; `frame` may be called from any thread and never blocks.

    A trace that cannot be written any more, as on a full disk, or as fast as it comes, ends there: `refused` says why,
    and the box goes on.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = AppendFile(Path(path), fresh=True, key="trace")
        self.refused: str | None = None
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        self._thread.start()
        self._numbers: dict[str, int] = {}
        self._resident: set[str] = set()

    def begin(
        self,
        policy: str,
        costs: Costs,
        best_s: Mapping[str, float],
        demands: Mapping[str, QuerySpec],
        budget_bytes: int,
        resident: Set[str],
    ) -> None:
        """Write the first line."""
        # In the order of their names, by which the schedule breaks ties.
        self._numbers = {name: number for number, name in enumerate(sorted(costs.tensor_bytes))}
        self._resident = set(resident)
        self._write({
            "trace": TRACE_FORMAT, "policy": policy, "budget_bytes": budget_bytes,
            "demands": {query: asdict(demand) for query, demand in demands.items()},
            "copy_bytes_per_s": costs.copy_bytes_per_s, "load_latency_s": costs.load_latency_s,
            "tensors": [[costs.tensor_bytes[name], costs.footprints[name]] for name in self._numbers],
            "queries": {query: {
                "tensors": self._of(cost.tensors), "run_s": cost.run_s, "workspace_bytes": cost.workspace_bytes,
                "sla_s": cost.sla_s, "larger": [asdict(batch) for batch in cost.larger], "best_s": best_s.get(query),
            } for query, cost in costs.queries.items()},
            "joint": [{
                "queries": list(joint.queries), "run_s": joint.cost.run_s, "sla_s": joint.cost.sla_s,
                "workspace_bytes": joint.cost.workspace_bytes, "larger": [asdict(one) for one in joint.cost.larger],
            } for joint in costs.joint],
            "resident": self._of(sorted(resident)),
        })  # fmt: skip

    def frame(self, query: str, captured_at: float, at: float) -> None:
        """A frame arrived."""
        self._write({"frame": [query, captured_at, at]})

    def step(
        self,
        state: SchedulerState,
        decision: Decision,
        budget_bytes: int,
        load_s: float | None,
        moved_bytes: int,
        run_s: float | None,
    ) -> None:
        """A decision was made and carried out."""
        appeared, vanished = state.resident - self._resident, self._resident - state.resident
        self._resident = (set(state.resident) - set(decision.evict)) | set(decision.load)
        self._write({
            "at": state.now, "query": decision.query, "count": decision.count,
            "also": [list(one) for one in decision.also], "load": self._of(decision.load),
            "evict": self._of(decision.evict), "drop": [list(one) for one in decision.drop], "load_s": load_s,
            "moved_bytes": moved_bytes, "run_s": run_s, "budget_bytes": budget_bytes,
            "urgency": dict(state.urgency), "resident": [self._of(sorted(appeared)), self._of(sorted(vanished))],
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
                self._end(f"{MAX_WAITING_LINES} lines of the trace wait to be written: the disk is too slow")

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


TRACE_HINT = "give the file that `trace:` named"
MAX_TRACE_BYTES, MAX_TRACE_LINES, MAX_TRACE_LINE_BYTES = 2**29, 300_000, 2**23
"""Of a trace; so many lines are more than an hour of a small box."""
MAX_TRACE_SECONDS = 1e9

_Seconds = Annotated[float, Field(ge=0, le=MAX_TRACE_SECONDS)]
_Moment = Annotated[float, Field(ge=-MAX_TRACE_SECONDS, le=MAX_TRACE_SECONDS)]
_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Count = Annotated[int, Field(ge=0, le=1024)]
_Numbers = list[Annotated[int, Field(ge=0)]]
_Name = Annotated[str, Field(min_length=1, max_length=100)]


class TraceSpec(Exact):
    """What a query asked for (`edge_runtime.scheduler.QuerySpec`)."""

    fps: Annotated[float, Field(gt=0, le=1e6)]
    urgency: Annotated[float, Field(ge=0, le=1e12)]
    staleness: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MAX_AGES, default_factory=list)]


class TraceBatch(Exact):
    """What was known of a batch (`edge_runtime.scheduler.costs.BatchCost`)."""

    count: _Count
    run_s: _Seconds
    workspace_bytes: _Bytes


class TraceQuery(Exact):
    """What was known of a query: tensors by number, seconds, bytes; `best_s` is its best run of one frame."""

    tensors: _Numbers
    run_s: _Seconds
    workspace_bytes: _Bytes
    sla_s: Annotated[float, Field(ge=1e-9, le=MAX_TRACE_SECONDS)]
    larger: Annotated[list[TraceBatch], Field(max_length=1024)]
    best_s: _Seconds | None


class TraceJoint(Exact):
    """What was known of a pass for several queries."""

    queries: Annotated[list[_Name], Field(min_length=2)]
    run_s: _Seconds
    workspace_bytes: _Bytes
    sla_s: Annotated[float, Field(ge=1e-9, le=MAX_TRACE_SECONDS)]
    larger: Annotated[list[TraceBatch], Field(max_length=1024)]


class TraceHeader(Exact):
    """The first line: `tensors` are [bytes stored, bytes occupied] by number."""

    trace: Annotated[int, Field(ge=TRACE_FORMAT, le=TRACE_FORMAT)]
    policy: _Name
    budget_bytes: _Bytes
    demands: dict[_Name, TraceSpec]
    copy_bytes_per_s: Annotated[float, Field(ge=1, le=1e15)]
    load_latency_s: _Seconds
    tensors: list[Annotated[tuple[_Bytes, _Bytes], Field(strict=False)]]
    queries: Annotated[dict[_Name, TraceQuery], Field(min_length=1)]
    joint: Annotated[list[TraceJoint], Field(default_factory=list)]
    resident: _Numbers


class TraceArrival(Exact):
    """The line of a frame: its query, when it was captured, when it arrived."""

    frame: Annotated[tuple[str, _Moment, _Moment], Field(strict=False)]


class TraceStep(Exact):
    """The line of a decision and what came of it."""

    at: _Moment
    query: str | None
    count: _Count
    also: Annotated[list[Annotated[tuple[str, _Count], Field(strict=False)]], Field(default_factory=list)]
    load: _Numbers
    evict: _Numbers
    drop: list[Annotated[tuple[str, _Moment, str], Field(strict=False)]]
    load_s: _Seconds | None
    moved_bytes: _Bytes
    run_s: _Seconds | None
    budget_bytes: _Bytes
    urgency: dict[str, Annotated[float, Field(ge=0, le=1e12)]]
    resident: Annotated[tuple[_Numbers, _Numbers], Field(strict=False)]


TraceLine = tuple[str, TraceArrival | TraceStep]
"""Where a line is, and what it holds."""


def read_trace(path: str | Path) -> tuple[TraceHeader, Iterator[TraceLine]]:
    """The first line of a trace, and the others lazily; a torn last line is left out.

    Raises InputError, which names the line, for a file that is none, at once or when the line is read.
    """
    lines = read_json_lines(Path(path), TRACE_HINT, MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES)
    first = next(lines, None)
    if first is None or first[1].get("trace") != TRACE_FORMAT:
        raise InputError(path, f"is no trace of format {TRACE_FORMAT}", TRACE_HINT)
    return validate(f"{path}: line 1", first[1], TraceHeader, hint=TRACE_HINT), _read_lines(path, lines)


def _read_lines(path: str | Path, lines: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[TraceLine]:
    for number, line in lines:
        if number > MAX_TRACE_LINES:
            raise InputError(path, f"has more than {MAX_TRACE_LINES} lines", "record a shorter run")
        where = f"{path}: line {number}"
        yield where, validate(where, line, TraceArrival if "frame" in line else TraceStep, hint=TRACE_HINT)


@contextlib.contextmanager
def consistent_line(where: str) -> Iterator[None]:
    """Turn the errors of numbers, names and times that contradict the lines before into an InputError."""
    try:
        yield
    except (LookupError, ValueError, AssertionError) as error:
        raise InputError(where, f"contradicts the lines before it ({one_line(error)})", TRACE_HINT) from error


def trace_costs(head: TraceHeader) -> Costs:
    """The costs in a trace's first line; tensors are named by their numbers (`numbered_names`)."""
    queries = {}
    for query, one in head.queries.items():
        larger = tuple(BatchCost(**dict(batch)) for batch in one.larger)
        queries[query] = QueryCost(numbered_names(one.tensors), one.run_s, one.workspace_bytes, one.sla_s, larger)
    names = numbered_names(range(len(head.tensors)))
    sizes, footprints = ({name: pair[part] for name, pair in zip(names, head.tensors)} for part in (0, 1))
    joint = []
    for alike in head.joint:
        if not set(alike.queries) <= queries.keys():
            raise ValueError("a pass of unknown queries")
        larger = tuple(BatchCost(**dict(batch)) for batch in alike.larger)
        cost = QueryCost((), alike.run_s, alike.workspace_bytes, alike.sla_s, larger)
        joint.append(JointCost(tuple(alike.queries), cost))
    return Costs(queries, sizes, head.copy_bytes_per_s, head.load_latency_s, footprints, tuple(joint))


def numbered_names(numbers: Iterable[int]) -> tuple[str, ...]:
    """Names for numbered tensors, which sort as the numbers do."""
    return tuple(f"{number:06}" for number in numbers)
