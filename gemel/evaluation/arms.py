"""Both arms on the virtual clock: merged and originals over the same streams, under the same bytes of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.policies import DEFAULT_POLICY, policy_named
from edge_runtime.rehearsal.simulator import FrameOutcome, Simulation, age_ms, simulate
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.pieces import condensed
from gemel.evaluation.streaming import Footage, Stream, lay_streams, shown
from models.tasks import task_of
from models.workload import Query

MERGED, ORIGINALS = "merged", "originals"
TIMELINE_S = 4.0
AGES = (50, 95, 99)
"""Percentiles of the ages of results that are told."""
COUNTS = ("received", "processed", "late", "failed", "pending")


@dataclass(frozen=True)
class Tested:
    """One query's test split as the streams need it: when, the truth, and both arms' answers, frame by frame."""

    query: Query
    footage: Footage
    truths: Sequence[Any]
    threshold: float
    answers: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Streamed:
    """The rows of `gemel eval` that come from the clock; `timeline` is at the least memory."""

    streaming: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    timeline: list[dict[str, Any]]
    swapping: list[dict[str, Any]]


def stream_arms(
    tested: Sequence[Tested],
    costs: Mapping[str, Costs],
    memory: Mapping[str, int],
    seeds: Iterable[int],
    tell: Callable[..., None],
    policy: str = DEFAULT_POLICY,
) -> Streamed:
    """Play every arm (a key of `costs`) under every memory setting (bytes), once per seed.

    The streams of a seed are the same for all arms and settings. Accuracies are means over seeds, with the least
    and the largest as `spread`; ages are pooled over seeds, frames are summed.
    """
    costs = {arm: condensed(cost) for arm, cost in costs.items()}
    streams = {seed: lay_streams({one.query.id: one.footage for one in tested}, seed) for seed in seeds}
    scorers = {(arm, one.query.id): Scorer(one, arm) for arm in costs for one in tested}
    result = Streamed([], [], [], [])
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
            ledger = summed(list(played.values()))
            result.ledger.extend({**where, **row} for row in ledger)
            result.swapping.append({**where, **_swapping(ledger, played.values())})
            if nbytes == min(memory.values()):
                result.timeline.append({**where, **timeline(next(iter(played.values())))})
    return result


class Scorer:
    """The task's metric over a stream; how well a frame's answer fits another frame's truth is counted once."""

    def __init__(self, tested: Tested, arm: str) -> None:
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


def _row(tested: Tested, scorer: Scorer, runs: Sequence[tuple[Stream, Sequence[FrameOutcome]]]) -> dict[str, Any]:
    standing = [shown(stream, outcomes) for stream, outcomes in runs]
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
        **{f"age_p{share}_ms": age_ms(ages, share) for share in AGES},
        "spread": [min(by_seed), max(by_seed)],
        "by_seed": by_seed,
        "answered": answered / moments if moments else 0.0,
    }


def _by_query(frames: Iterable[FrameOutcome]) -> dict[str, list[FrameOutcome]]:
    found: dict[str, list[FrameOutcome]] = {}
    for frame in frames:
        found.setdefault(frame.query, []).append(frame)
    return found


def summed(simulations: Sequence[Simulation]) -> list[dict[str, Any]]:
    """The ledgers of several simulations added up, one row per query."""
    rows: dict[str, dict[str, Any]] = {}
    for simulation in simulations:
        for account in simulation.ledger.to_json():
            row = rows.setdefault(account["query"], {"query": account["query"], **dict.fromkeys(COUNTS, 0)})
            for name in COUNTS:
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


def timeline(simulation: Simulation, window_s: float = TIMELINE_S) -> dict[str, Any]:
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
