"""Streaming accuracy: what a query knew at each moment, not what its model would have said given time.

Li, Wang and Ramanan 2020 ("Towards Streaming Perception", sAP): at each labelled frame's time the newest
finished result is scored, however old. Here each query's test units (clips or tracks) are played back to
back, in an order and with a phase drawn from a seed; the schedule decides on a virtual clock which frames are
looked at and when that ends. Pure functions over plain values: the answers were predicted once, offline.

Both arms on the virtual clock: merged and originals over the same streams, under the same bytes of memory.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np

from edge_runtime.policies import DEFAULT_POLICY, policy_named
from edge_runtime.scheduler.costs import Costs, coalesced
from edge_runtime.simulation.simulator import FrameOutcome, Simulation, age_ms, simulate
from models.tasks import task_of
from models.workload import Query

DEFAULT_INTERVAL_S = 1.0
CLOCK_SLACK_S = 1e-6


class Outcome(Protocol):
    """What became of one delivered frame (`edge_runtime.simulation.simulator.FrameOutcome`)."""

    @property
    def query(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def captured_at(self) -> float: ...
    @property
    def finished_at(self) -> float | None: ...


@dataclass(frozen=True)
class Footage:
    """When a query's labelled test frames were taken: each frame's unit, and seconds into it."""

    units: tuple[str, ...]
    times_s: tuple[float, ...]
    fps: float | None


@dataclass(frozen=True)
class Stream:
    """A query's labelled frames on the stream's clock.

    Per labelled moment, in order of time: `at_s` seconds, `frames` the index in the test split, `plays` which
    playing of a unit it belongs to. `delivered` are the moments (positions in `at_s`) whose frames the camera
    hands over.
    """

    at_s: tuple[float, ...]
    frames: tuple[int, ...]
    plays: tuple[int, ...]
    delivered: tuple[int, ...]

    def arrivals(self) -> tuple[float, ...]:
        """Capture times of the delivered frames, in seconds."""
        return tuple(self.at_s[moment] for moment in self.delivered)


def sampled_positions(times_s: Sequence[float], fps: float | None) -> list[int]:
    """Positions of the frames a camera at `fps` delivers: the first at or after each tick of its clock."""
    if fps is None:
        return list(range(len(times_s)))
    kept, ticks = [], 0.0
    for position, time_s in enumerate(times_s):
        elapsed = (time_s - times_s[0]) * fps
        if elapsed >= ticks - CLOCK_SLACK_S * fps:
            kept.append(position)
            ticks = int(elapsed + CLOCK_SLACK_S * fps) + 1.0
    return kept


def units_of(footage: Footage) -> list[list[int]]:
    """The frames of each unit (indices into the split), each unit in order of time."""
    found: dict[str, list[int]] = {}
    for index, unit in enumerate(footage.units):
        found.setdefault(unit, []).append(index)
    return [sorted(frames, key=lambda frame: footage.times_s[frame]) for frames in found.values()]


def frame_interval_s(footage: Footage) -> float:
    """The usual time between two labelled frames of a unit (median), in seconds."""
    times = footage.times_s
    gaps = [times[b] - times[a] for unit in units_of(footage) for a, b in pairwise(unit)]
    gaps = [gap for gap in gaps if gap > 0]
    if gaps:
        return median(gaps)
    return 1 / footage.fps if footage.fps else DEFAULT_INTERVAL_S


def length_s(footage: Footage) -> float:
    """Seconds that one playing of all units takes."""
    interval, times = frame_interval_s(footage), footage.times_s
    return sum(times[unit[-1]] - times[unit[0]] + interval for unit in units_of(footage))


def build_stream(footage: Footage, rng: random.Random, until_s: float) -> Stream:
    """Play the units back to back, each round in a newly shuffled order, from a drawn phase until `until_s`.

    Every unit is played at least once; a unit that has begun is played to its end.
    """
    units, interval = units_of(footage), frame_interval_s(footage)
    clock, play = rng.uniform(0, interval), 0
    at_s: list[float] = []
    frames: list[int] = []
    plays: list[int] = []
    delivered: list[int] = []
    while units and (play < len(units) or clock < until_s):
        if play % len(units) == 0:
            order = rng.sample(range(len(units)), len(units))
        unit = units[order[play % len(units)]]
        times = [footage.times_s[frame] for frame in unit]
        delivered += [len(at_s) + kept for kept in sampled_positions(times, footage.fps)]
        at_s += [clock + time_s - times[0] for time_s in times]
        frames += unit
        plays += [play] * len(unit)
        clock += times[-1] - times[0] + interval
        play += 1
    return Stream(tuple(at_s), tuple(frames), tuple(plays), tuple(delivered))


def build_streams(footage: Mapping[str, Footage], seed: int) -> dict[str, Stream]:
    """The streams of all queries for one seed; all go on until the longest has played once."""
    until_s = max((length_s(one) for one in footage.values()), default=0.0)
    return {query: build_stream(one, random.Random(f"{seed}/{query}"), until_s) for query, one in footage.items()}


def latest_results(stream: Stream, outcomes: Sequence[Outcome]) -> list[int | None]:
    """For each labelled moment the frame (index in the split) whose answer stands; None while none is.

    `outcomes` are those of this query; `index` counts its delivered frames. A result of an earlier playing of
    a unit says nothing about this one.
    """
    finished = [
        (outcome.finished_at, stream.delivered[outcome.index])
        for outcome in outcomes
        if outcome.finished_at is not None
    ]
    finished.sort()
    standing: list[int | None] = []
    newest: int | None = None
    upto = 0
    for moment, now in enumerate(stream.at_s):
        while upto < len(finished) and finished[upto][0] <= now:
            newest = finished[upto][1] if newest is None else max(newest, finished[upto][1])
            upto += 1
        fresh = newest is not None and stream.plays[newest] == stream.plays[moment]
        standing.append(stream.frames[newest] if newest is not None and fresh else None)
    return standing


MERGED, ORIGINALS = "merged", "originals"
TIMELINE_S = 4.0
AGE_PERCENTILES = (50, 95, 99)
"""Percentiles of the ages of results that are told."""
LEDGER_COUNTS = ("received", "processed", "late", "failed", "pending")


@dataclass(frozen=True)
class QueryTest:
    """One query's test split as the streams need it: when, the truth, and both arms' answers, frame by frame."""

    query: Query
    footage: Footage
    truths: Sequence[Any]
    threshold: float
    answers: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class StreamResults:
    """The rows of `gemel eval` that come from the clock; `timeline` is at the least memory."""

    streaming: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    timeline: list[dict[str, Any]]
    swapping: list[dict[str, Any]]


def evaluate_streams(
    tested: Sequence[QueryTest],
    costs: Mapping[str, Costs],
    memory: Mapping[str, int],
    seeds: Iterable[int],
    tell: Callable[..., None],
    policy: str = DEFAULT_POLICY,
) -> StreamResults:
    """Play every arm (a key of `costs`) under every memory setting (bytes), once per seed.

    The streams of a seed are the same for all arms and settings. Accuracies are means over seeds, with the least
    and the largest as `spread`; ages are pooled over seeds, frames are summed.
    """
    costs = {arm: coalesced(cost) for arm, cost in costs.items()}
    streams = {seed: build_streams({one.query.id: one.footage for one in tested}, seed) for seed in seeds}
    scorers = {(arm, one.query.id): Scorer(one, arm) for arm in costs for one in tested}
    result = StreamResults([], [], [], [])
    for setting, nbytes in memory.items():
        for arm, cost in costs.items():
            tell("stream", arm=arm, memory=setting, memory_bytes=nbytes)
            played = {
                seed: simulate(
                    cost, {query: stream.arrivals() for query, stream in laid.items()}, nbytes, policy_named(policy)
                )
                for seed, laid in streams.items()
            }
            where = {"arm": arm, "memory": setting, "memory_bytes": nbytes}
            outcomes = {seed: _by_query(simulation.frames) for seed, simulation in played.items()}
            for one in tested:
                query = one.query.id
                runs = [(streams[seed][query], found.get(query, [])) for seed, found in outcomes.items()]
                result.streaming.append({**where, **_row(one, scorers[arm, query], runs)})
            ledger = sum_ledgers(list(played.values()))
            result.ledger.extend({**where, **row} for row in ledger)
            result.swapping.append({**where, **_swapping(ledger, played.values())})
            if nbytes == min(memory.values()):
                result.timeline.append({**where, **residency_timeline(next(iter(played.values())))})
    return result


class Scorer:
    """The task's metric over a stream; how well a frame's answer fits another frame's truth is counted once."""

    def __init__(self, tested: QueryTest, arm: str) -> None:
        self._tested, self._answers = tested, tested.answers[arm]
        self._task = task_of(tested.query.task)
        self._tallies: dict[tuple[int | None, int], np.ndarray] = {}

    def __call__(self, stream: Stream, standing: Sequence[int | None]) -> float:
        pairs = list(zip(standing, stream.frames, strict=True))
        self._count(list(dict.fromkeys(pair for pair in pairs if pair not in self._tallies)))
        return self._task.metric_of(np.sum([self._tallies[pair] for pair in pairs], axis=0))

    def _count(self, pairs: Sequence[tuple[int | None, int]]) -> None:
        if pairs:
            one = self._tested
            answers = [None if answered is None else self._answers[answered] for answered, _ in pairs]
            truths = [one.truths[frame] for _, frame in pairs]
            found = self._task.tallies(answers, truths, one.query.classes, one.threshold)
            self._tallies.update(zip(pairs, found, strict=True))


def _row(tested: QueryTest, scorer: Scorer, runs: Sequence[tuple[Stream, Sequence[FrameOutcome]]]) -> dict[str, Any]:
    standing = [latest_results(stream, outcomes) for stream, outcomes in runs]
    by_seed = [scorer(stream, frames) for (stream, _), frames in zip(runs, standing, strict=True)]
    ages = [
        one.finished_at - one.captured_at for _, outcomes in runs for one in outcomes if one.finished_at is not None
    ]
    moments = sum(len(frames) for frames in standing)
    answered = sum(frame is not None for frames in standing for frame in frames)
    return {
        "query": tested.query.id,
        "metric": task_of(tested.query.task).metric,
        "accuracy": sum(by_seed) / len(by_seed),
        **{f"age_p{share}_ms": age_ms(ages, share) for share in AGE_PERCENTILES},
        "spread": [min(by_seed), max(by_seed)],
        "by_seed": by_seed,
        "answered": answered / moments if moments else 0.0,
    }


def _by_query(frames: Iterable[FrameOutcome]) -> dict[str, list[FrameOutcome]]:
    found: dict[str, list[FrameOutcome]] = {}
    for frame in frames:
        found.setdefault(frame.query, []).append(frame)
    return found


def sum_ledgers(simulations: Sequence[Simulation]) -> list[dict[str, Any]]:
    """The ledgers of several simulations added up, one row per query."""
    rows: dict[str, dict[str, Any]] = {}
    for simulation in simulations:
        for account in simulation.ledger.to_json():
            row = rows.setdefault(account["query"], {"query": account["query"], **dict.fromkeys(LEDGER_COUNTS, 0)})
            for name in LEDGER_COUNTS:
                row[name] += account[name]
            row["dropped"] = dict(Counter(row.get("dropped", {})) + Counter(account["dropped"]))
    return list(rows.values())


def _swapping(ledger: Sequence[Mapping[str, Any]], simulations: Iterable[Simulation]) -> dict[str, int]:
    return {
        "received": sum(row["received"] for row in ledger),
        "processed": sum(row["processed"] for row in ledger),
        "bytes_moved": sum(simulation.bytes_moved for simulation in simulations),
        "swaps": sum(simulation.swaps for simulation in simulations),
    }


def residency_timeline(simulation: Simulation, window_s: float = TIMELINE_S) -> dict[str, Any]:
    """When each query was resident (all its tensors) and when it ran, in spans of seconds from the first frame on."""
    start = min((frame.captured_at for frame in simulation.frames), default=0.0)
    end = start + window_s
    resident: set[str] = set()
    spans: dict[str, list[list[float]]] = {query: [] for query in simulation.costs.queries}
    since: dict[str, float] = {}
    for change in simulation.changes:
        if change.at_s >= end:
            break
        resident.difference_update(change.evicted)
        resident.update(change.loaded)
        for query, cost in simulation.costs.queries.items():
            whole = cost.needed <= resident
            if whole and query not in since:
                since[query] = change.at_s
            elif not whole and query in since:
                spans[query].append([since.pop(query), change.at_s])
    for query, began in since.items():
        spans[query].append([began, end])
    runs: dict[str, list[list[float]]] = {query: [] for query in simulation.costs.queries}
    for frame in simulation.frames:
        if frame.started_at is not None and frame.finished_at is not None and frame.started_at < end:
            runs[frame.query].append([frame.started_at, min(frame.finished_at, end)])
    return {
        "from_s": start,
        "to_s": end,
        "queries": [{"query": query, "resident": spans[query], "runs": runs[query]} for query in runs],
    }
