"""Streaming accuracy of merged models and originals over the same streams, with the same device memory.

sAP (Li, Wang and Ramanan 2020, "Towards Streaming Perception"): at each labelled frame's time the newest finished
result is scored, however old. A query's test clips or tracks are played back to back, in an order and with a phase
drawn from a seed; the scheduler decides on a virtual clock which frames run and when they finish. Predictions are made
once, offline.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from gemel.analytic_costs import bundle_originals, find_profile, workload_originals
from gemel.conditions import MEASURED, machine_memory_bytes
from gemel.edge_runtime.policies import DEFAULT_POLICY, policy_named
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors
from gemel.edge_runtime.scheduler.types import Curve, monotone_curve
from gemel.edge_runtime.simulation.device_profiles import costs_for
from gemel.edge_runtime.simulation.profile_io import measured_costs, note_machine, read_profile
from gemel.edge_runtime.simulation.simulator import FrameOutcome, Simulation, age_ms, simulate
from gemel.merger.computed import build_answerer
from gemel.models.bundle import Bundle
from gemel.models.data import load_split
from gemel.models.files.video import RateGate
from gemel.models.measures.evaluation import load_labels, predict, threshold_without_labels
from gemel.models.predictions import Task
from gemel.models.tasks import task_of
from gemel.models.workload import Query
from gemel.report.document import (
    MERGED,
    ORIGINALS,
    Arm,
    CostRow,
    LedgerRow,
    ReportDevice,
    StreamRow,
    TransferRow,
)

DEFAULT_INTERVAL_S = 1.0
CLOCK_SLACK_S = 1e-6
STALENESS_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""In frames of the query's rate; ages between are interpolated."""


@dataclass(frozen=True)
class Footage:
    """When a query's labelled test frames were taken: each frame's unit (clip or track), and seconds into it."""

    units: tuple[str, ...]
    times_s: tuple[float, ...]
    fps: float | None


@dataclass(frozen=True)
class Stream:
    """A query's labelled frames on the stream's clock.

    Per labelled moment, in order of time: `at_s` seconds, `frames` the index in the test split, `plays` the number of
    the unit's playing. `delivered` are the moments (positions in `at_s`) whose frames the camera delivers.
    """

    at_s: tuple[float, ...]
    frames: tuple[int, ...]
    plays: tuple[int, ...]
    delivered: tuple[int, ...]

    def arrivals(self) -> tuple[float, ...]:
        """Capture times of the delivered frames, in seconds."""
        return tuple(self.at_s[moment] for moment in self.delivered)


@dataclass(frozen=True)
class QueryTest:
    """One query's test split: when its frames were taken, their labels, and both arms' predictions, frame by frame."""

    query: Query
    footage: Footage
    labels: Sequence[Any]
    threshold: float
    predictions: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class StreamResults:
    """Rows of the report, for each arm at each memory setting."""

    streaming: list[StreamRow] = field(default_factory=list)
    ledger: list[LedgerRow] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)


@dataclass(frozen=True)
class CostModel:
    """The costs of both arms on one device, modelled or measured."""

    costs: Mapping[Arm, Costs]
    device: ReportDevice

    def rows(self) -> list[CostRow]:
        """The costs of each arm and query; a load is that of all the query's weights."""
        return [
            CostRow(
                arm=arm, query=query, weights_bytes=(weights := cost.moved_bytes(one.tensors)),
                load_ms=1000 * cost.load_s(weights), run_ms=1000 * one.run_s, workspace_bytes=one.workspace_bytes,
            )
            for arm, cost in self.costs.items()
            for query, one in cost.queries.items()
        ]  # fmt: skip


def load_cost_model(device: str, bundle: Bundle, workload: Sequence[Query] = ()) -> CostModel:
    """The cost model of a device profile by name, or of BUNDLE.profile.json for `measured`; InputError for others.

    Originals are those of the workload where it is given, else what the bundle says of them.
    """
    originals = workload_originals(workload) if workload else bundle_originals(bundle)
    costs: dict[Arm, Costs]
    if device == MEASURED:
        found = read_profile(bundle)
        note_machine(bundle, found)
        costs = {ORIGINALS: measured_costs(originals, found), MERGED: measured_costs(bundle, found)}
        title, sources = f"{found.machine['name']} ({found.device})", [f"gemel profile, engine {found.engine}"]
        modelled, memory = False, machine_memory_bytes() if found.device == "cpu" else 0
    else:
        profile = find_profile(device)
        costs = {ORIGINALS: costs_for(profile, originals), MERGED: costs_for(profile, bundle)}
        title, sources, modelled = profile.title, list(profile.sources), profile.modelled
        memory = profile.memory_bytes
    return CostModel(
        costs,
        ReportDevice(
            name=device, title=title, modelled=modelled, sources=sources, clock="virtual clock", memory_bytes=memory
        ),
    )


def evaluate_streams(
    tests: Sequence[QueryTest],
    costs: Mapping[Arm, Costs],
    memory: Mapping[str, int],
    seeds: Iterable[int],
    progress: Callable[..., None],
    policy: str = DEFAULT_POLICY,
) -> StreamResults:
    """Simulate every arm (a key of `costs`) at every memory setting (bytes), once per seed.

    The streams of a seed are the same for all arms and settings. Accuracies are means over seeds, with the lowest and
    the highest as `spread`; ages are pooled over seeds, frames are summed.
    """
    costs = {arm: coalesce_tensors(cost) for arm, cost in costs.items()}
    streams = [build_streams({one.query.id: one.footage for one in tests}, seed) for seed in seeds]
    scorers = {(arm, one.query.id): Scorer(one, arm) for arm in costs for one in tests}
    results = StreamResults()
    for setting, nbytes in memory.items():
        for arm, cost in costs.items():
            progress("stream", arm=arm, memory=setting, memory_bytes=nbytes)
            simulations = [
                simulate(cost, {query: one.arrivals() for query, one in own.items()}, nbytes, policy_named(policy))
                for own in streams
            ]
            key: dict[str, Any] = {"arm": arm, "memory": setting, "memory_bytes": nbytes}
            outcomes = [_by_query(simulation.frames) for simulation in simulations]
            for one in tests:
                query = one.query.id
                runs = [(own[query], found[query]) for own, found in zip(streams, outcomes, strict=True)]
                results.streaming.append(StreamRow(**key, **_score_streams(one, scorers[arm, query], runs)))
            ledger = sum_ledgers(simulations, key)
            results.ledger.extend(ledger)
            results.transfers.append(TransferRow(
                **key, received=sum(row.received for row in ledger), processed=sum(row.processed for row in ledger),
                bytes_moved=sum(one.bytes_moved for one in simulations), swaps=sum(one.swaps for one in simulations),
            ))  # fmt: skip
    return results


class Scorer:
    """The task's metric over a stream; each pair of (predicted frame, labelled frame) is compared once."""

    def __init__(self, test: QueryTest, arm: str) -> None:
        self._test, self._predictions = test, test.predictions[arm]
        self._task = task_of(test.query)
        self._tallies: dict[tuple[int | None, int], np.ndarray] = {}

    def __call__(self, stream: Stream, latest: Sequence[int | None]) -> float:
        pairs = list(zip(latest, stream.frames, strict=True))
        self._compare(list(dict.fromkeys(pair for pair in pairs if pair not in self._tallies)))
        return self._task.metric_of(np.sum([self._tallies[pair] for pair in pairs], axis=0))

    def _compare(self, pairs: Sequence[tuple[int | None, int]]) -> None:
        if pairs:
            one = self._test
            predictions = [None if frame is None else self._predictions[frame] for frame, _ in pairs]
            labels = [one.labels[frame] for _, frame in pairs]
            found = self._task.tallies(predictions, labels, one.query.classes, one.threshold)
            self._tallies.update(zip(pairs, found, strict=True))


def latest_results(stream: Stream, outcomes: Sequence[FrameOutcome]) -> list[int | None]:
    """For each labelled moment the frame (index in the split) whose result is the newest; None before the first.

    `outcomes` are those of this query; `index` counts its delivered frames. A result of an earlier playing of a unit
    does not count.
    """
    finished = sorted(
        (outcome.finished_at, stream.delivered[outcome.index])
        for outcome in outcomes
        if outcome.finished_at is not None
    )
    latest: list[int | None] = []
    newest: int | None = None
    upto = 0
    for moment, now in enumerate(stream.at_s):
        while upto < len(finished) and finished[upto][0] <= now:
            newest = finished[upto][1] if newest is None else max(newest, finished[upto][1])
            upto += 1
        current = newest is not None and stream.plays[newest] == stream.plays[moment]
        latest.append(stream.frames[newest] if newest is not None and current else None)
    return latest


def units_of(footage: Footage) -> list[list[int]]:
    """The frames (indices) of each clip or track in order of time."""
    found: dict[str, list[int]] = {}
    for frame, unit in enumerate(footage.units):
        found.setdefault(unit, []).append(frame)
    return [sorted(frames, key=lambda frame: footage.times_s[frame]) for frames in found.values()]


def sampled_positions(times_s: Sequence[float], fps: float | None) -> list[int]:
    """Positions of the frames a camera at `fps` delivers: the first at or after each tick of its clock."""
    gate = RateGate(fps)
    return [position for position, time_s in enumerate(times_s) if gate.passes(time_s - times_s[0])]


def frame_interval_s(footage: Footage) -> float:
    """Median time between two labelled frames of a unit, in seconds."""
    times = footage.times_s
    gaps = [times[b] - times[a] for unit in units_of(footage) for a, b in pairwise(unit)]
    gaps = [gap for gap in gaps if gap > 0]
    if gaps:
        return median(gaps)
    return 1 / footage.fps if footage.fps else DEFAULT_INTERVAL_S


def duration_s(footage: Footage) -> float:
    """Seconds that one playing of all units takes."""
    interval, times = frame_interval_s(footage), footage.times_s
    return sum(times[unit[-1]] - times[unit[0]] + interval for unit in units_of(footage))


def build_stream(footage: Footage, rng: random.Random, until_s: float) -> Stream:
    """Play the units back to back, each round in a newly shuffled order, from a drawn phase until `until_s`.

    Every unit is played at least once, and to its end.
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
        delivered += [len(at_s) + position for position in sampled_positions(times, footage.fps)]
        at_s += [clock + time_s - times[0] for time_s in times]
        frames += unit
        plays += [play] * len(unit)
        clock += times[-1] - times[0] + interval
        play += 1
    return Stream(tuple(at_s), tuple(frames), tuple(plays), tuple(delivered))


def build_streams(footage: Mapping[str, Footage], seed: int) -> dict[str, Stream]:
    """The streams of all queries for one seed; all go on until the longest has played once."""
    until_s = max((duration_s(one) for one in footage.values()), default=0.0)
    return {query: build_stream(one, random.Random(f"{seed}/{query}"), until_s) for query, one in footage.items()}


def sum_ledgers(simulations: Sequence[Simulation], key: Mapping[str, Any]) -> list[LedgerRow]:
    """The ledgers of several simulations of one arm and memory (`key`) added up, one row per query."""
    counts, dropped = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for account in (account for simulation in simulations for account in simulation.ledger.to_json()):
        query = account.pop("query")
        dropped[query].update(account.pop("dropped"))
        counts[query].update(account)
    rows = ({**key, "query": query, "dropped": dropped[query], **own} for query, own in counts.items())
    return [LedgerRow.model_validate(row) for row in rows]


def query_staleness(query: Query, bundle: Bundle, device: str) -> Curve:
    """The staleness curve of a bundle's query on val, against labels, or the predictions themselves without labels.

    Empty where the split has no two frames of one clip or track.
    """
    split, task = load_split(query, "val"), task_of(query)
    predictions = predict(build_answerer(bundle, query.id, device), query, split)
    threshold = bundle.query(query.id).threshold
    threshold = threshold_without_labels(query) if threshold is None else threshold
    labels = load_labels(query, split, predictions, threshold)
    footage = Footage(split.units, split.times_s, query.fps)
    curve = staleness_curve(task, footage, predictions, labels, query.classes, threshold)
    return curve if len(curve) > 1 else ()


def staleness_curve(
    task: Task, footage: Footage, predictions: Sequence[Any], labels: Sequence[Any], classes: Sequence[str],
    threshold: float,
) -> Curve:  # fmt: skip
    """The accuracy of predictions 0, 1, 2... frames old against the label of each moment, never rising.

    The curve ends at the age that no clip is long enough for.
    """
    known: list[tuple[int, float]] = []
    for age in STALENESS_AGES:
        pairs = frame_pairs(footage, age)
        if not pairs:
            break
        old, new = [predictions[before] for before, _ in pairs], [labels[now] for _, now in pairs]
        known.append((age, task.metric_of(task.tallies(old, new, classes, threshold).sum(axis=0))))
    curve = [accuracy for _, accuracy in known[:1]]
    for (young, high), (old_age, low) in pairwise(known):
        curve += [high + (age - young) / (old_age - young) * (low - high) for age in range(young + 1, old_age + 1)]
    return monotone_curve(curve)


def frame_pairs(footage: Footage, age: int) -> list[tuple[int, int]]:
    """For each frame the newest of its unit that is `age` frames of the query's rate older, as indices (then, now)."""
    pairs = []
    for unit in units_of(footage):
        times = [footage.times_s[frame] for frame in unit]
        for place, frame in enumerate(unit):
            then = place - age
            if footage.fps is not None:
                then = bisect_right(times, times[place] - age / footage.fps + CLOCK_SLACK_S) - 1
            if then >= 0:
                pairs.append((unit[then], frame))
    return pairs


def _score_streams(
    test: QueryTest, scorer: Scorer, runs: Sequence[tuple[Stream, Sequence[FrameOutcome]]]
) -> dict[str, Any]:
    latest = [latest_results(stream, outcomes) for stream, outcomes in runs]
    by_seed = [scorer(stream, frames) for (stream, _), frames in zip(runs, latest, strict=True)]
    ages = [
        one.finished_at - one.captured_at for _, outcomes in runs for one in outcomes if one.finished_at is not None
    ]
    moments = [frame is not None for frames in latest for frame in frames]
    return {
        "query": test.query.id,
        "metric": task_of(test.query).metric,
        "accuracy": sum(by_seed) / len(by_seed),
        **{f"age_p{share}_ms": age_ms(ages, share) for share in (50, 95, 99)},
        "spread": [min(by_seed), max(by_seed)],
        "by_seed": by_seed,
        "answered": sum(moments) / len(moments) if moments else 0.0,
    }


def _by_query(frames: Iterable[FrameOutcome]) -> dict[str, list[FrameOutcome]]:
    found = defaultdict[str, list[FrameOutcome]](list)
    for frame in frames:
        found[frame.query].append(frame)
    return found
