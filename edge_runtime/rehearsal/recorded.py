"""A trace as it is read again: every line checked, so that a replay meets nothing that no box could have written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from edge_runtime.rehearsal.trace import FORMAT
from edge_runtime.schedule.costs import BatchCost, Costs, QueryCost
from edge_runtime.schedule.staleness import MAX_AGES
from models.errors import InputError
from models.io import Exact, read_json_lines, validate

REMEDY = "give the file that `trace:` named"
MAX_BYTES, MAX_LINES, MAX_LINE_BYTES = 2**29, 300_000, 2**23
"""Of a trace; so many lines are more than an hour of a small box."""
MAX_SECONDS = 1e9
MAX_COUNT = 1024

_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
_Moment = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)]
_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Numbers = list[Annotated[int, Field(ge=0)]]
_Name = Annotated[str, Field(min_length=1, max_length=100)]


class Demanded(Exact):
    """What a query asked for (`edge_runtime.schedule.Demand`)."""

    fps: Annotated[float, Field(gt=0, le=1e6)]
    urgency: Annotated[float, Field(ge=0, le=1e12)]
    staleness: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=MAX_AGES, default_factory=list)]


class Batch(Exact):
    """What was known of a batch (`edge_runtime.schedule.costs.BatchCost`)."""

    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    run_s: _Seconds
    workspace_bytes: _Bytes


class Asked(Exact):
    """What was known of a query: tensors by number, seconds, bytes; `best_s` is its best run of one frame."""

    tensors: _Numbers
    run_s: _Seconds
    workspace_bytes: _Bytes
    sla_s: Annotated[float, Field(ge=1e-9, le=MAX_SECONDS)]
    larger: Annotated[list[Batch], Field(max_length=MAX_COUNT)]
    best_s: _Seconds | None


class Head(Exact):
    """The first line: `tensors` are [bytes stored, bytes occupied] by number."""

    trace: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    policy: _Name
    budget_bytes: _Bytes
    demands: dict[_Name, Demanded]
    copy_bytes_per_s: Annotated[float, Field(ge=1, le=1e15)]
    load_latency_s: _Seconds
    tensors: list[Annotated[tuple[_Bytes, _Bytes], Field(strict=False)]]
    queries: Annotated[dict[_Name, Asked], Field(min_length=1)]
    resident: _Numbers


class Arrival(Exact):
    """The line of a frame: its query, when it was captured, when it was told of."""

    frame: Annotated[tuple[str, _Moment, _Moment], Field(strict=False)]


class Step(Exact):
    """The line of a decision and what came of it."""

    at: _Moment
    turn: str | None
    count: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    load: _Numbers
    evict: _Numbers
    drop: list[Annotated[tuple[str, _Moment, str], Field(strict=False)]]
    load_s: _Seconds | None
    moved_bytes: _Bytes
    run_s: _Seconds | None
    budget_bytes: _Bytes
    urgency: dict[str, Annotated[float, Field(ge=0, le=1e12)]]
    resident: Annotated[tuple[_Numbers, _Numbers], Field(strict=False)]


def read_trace(path: str | Path) -> tuple[Head, Iterator[Arrival | Step]]:
    """The first line of a trace, and the others as they are asked for; a torn last line is left out.

    Raises InputError, which names the line, for a file that is none, then or when the line is asked for.
    """
    lines = read_json_lines(Path(path), REMEDY, MAX_BYTES, MAX_LINE_BYTES)
    first = next(lines, None)
    if first is None or first[1].get("trace") != FORMAT:
        raise InputError(path, f"is no trace of format {FORMAT}", REMEDY)
    where = f"{path}: line 1"
    head = validate(where, first[1], Head, remedy=REMEDY)
    _check_known(where, head.demands, head.queries)
    if head.demands.keys() != head.queries.keys():
        raise InputError(where, "not every query has a demand", REMEDY, "demands")
    for numbers in (head.resident, *(one.tensors for one in head.queries.values())):
        _check_numbers(where, numbers, head)
    for query, one in head.queries.items():
        batches = [(1, one.run_s), *((batch.count, batch.run_s) for batch in one.larger)]
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(batches)):
            fault = "larger batches must ascend and take no less time"
            raise InputError(where, fault, REMEDY, f"queries.{query}.larger")
    return head, _events(path, head, lines)


def costs_of(head: Head) -> Costs:
    """The costs in a trace's first line; tensors are named by their numbers (`numbered`)."""
    queries = {}
    for query, one in head.queries.items():
        larger = tuple(BatchCost(**dict(batch)) for batch in one.larger)
        queries[query] = QueryCost(numbered(one.tensors), one.run_s, one.workspace_bytes, one.sla_s, larger)
    sizes = {numbered([number])[0]: pair for number, pair in enumerate(head.tensors)}
    return Costs(
        queries,
        {name: pair[0] for name, pair in sizes.items()},
        head.copy_bytes_per_s,
        head.load_latency_s,
        {name: pair[1] for name, pair in sizes.items()},
    )


def numbered(numbers: Iterable[int]) -> tuple[str, ...]:
    """Names for numbered tensors, which sort as the numbers do."""
    return tuple(f"{number:06}" for number in numbers)


def _events(path: str | Path, head: Head, lines: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[Arrival | Step]:
    """The lines after the first one."""
    now, told = -MAX_SECONDS, dict.fromkeys(head.queries, -MAX_SECONDS)
    largest = {query: max([1, *(batch.count for batch in one.larger)]) for query, one in head.queries.items()}
    for number, line in lines:
        where = f"{path}: line {number}"
        if number > MAX_LINES:
            raise InputError(path, f"has more than {MAX_LINES} lines", "record a shorter run")
        if "frame" in line:
            arrival = validate(where, line, Arrival, remedy=REMEDY)
            query, _, at = arrival.frame
            _check_known(where, [query], head.queries)
            if at < told[query]:
                raise InputError(where, "the time goes backwards", REMEDY, "frame")
            told[query] = at
            yield arrival
            continue
        step = validate(where, line, Step, remedy=REMEDY)
        if step.at < now:
            raise InputError(where, "the time goes backwards", REMEDY, "at")
        now = step.at
        turn = [] if step.turn is None else [step.turn]
        _check_known(where, [*turn, *step.urgency, *(query for query, _, _ in step.drop)], head.queries)
        for numbers in (step.load, step.evict, *step.resident):
            _check_numbers(where, numbers, head)
        least = 0 if step.run_s is None else 1
        if step.turn is not None and not least <= step.count <= largest[step.turn]:
            raise InputError(where, f"a run of {step.count} frames is not known", REMEDY, "count")
        yield step


def _check_known(where: str, queries: Iterable[str], known: Collection[str]) -> None:
    for query in queries:
        if query not in known:
            raise InputError(where, f"there is no query '{query[:100]}'", REMEDY)


def _check_numbers(where: str, numbers: Iterable[int], head: Head) -> None:
    for number in numbers:
        if number >= len(head.tensors):
            raise InputError(where, f"there is no tensor {number}", REMEDY)
