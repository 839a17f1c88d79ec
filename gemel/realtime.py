"""The merged queries on this machine in real time, beside the virtual clock with the costs measured here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_runtime.box import known_costs
from edge_runtime.device import Device, arena_bytes
from edge_runtime.engines.registry import FALLBACK, make_engine
from edge_runtime.engines.setup import layouts_within
from edge_runtime.executor import Executor
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from edge_runtime.policies import DEFAULT_POLICY, policy_named
from edge_runtime.queues import Frame, Ledger, Mailboxes
from edge_runtime.results import Publisher, RunIdentity
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import Costs
from edge_runtime.simulation.profile_io import describe_machine
from edge_runtime.simulation.simulator import age_p95_ms, simulate
from edge_runtime.sinks.base import ResultMessage
from gemel.stream_eval import MERGED, QueryTest, Scorer, Stream, latest_results
from models.bundle import Bundle
from models.errors import InputError
from models.preprocess import Roi

DEFAULT_FPS = 10.0
MAX_PICTURE_BYTES = 2**30
"""Of all decoded frames, which are held in memory."""
DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Result:
    """A finished frame (`gemel.stream_eval.StreamOutcome`), in seconds of the stream."""

    query: str
    index: int
    captured_at: float
    finished_at: float | None


def evaluate_realtime(
    bundle: Bundle,
    tests: Sequence[QueryTest],
    pictures: Mapping[str, Sequence[np.ndarray]],
    streams: Mapping[str, Stream],
    budget_bytes: int,
    seconds: float,
) -> dict[str, Any]:
    """Run the first seconds of these streams on this machine, and on the virtual clock with the costs measured here.

    `pictures` are each query's input frames, RGB uint8 (H, W, 3). The box's own warm-up measures the costs; the budget
    grows to the largest query if its workspace needs that. Per query: streaming accuracy, frames processed and p95 age
    by both clocks. Raises InputError if the decoded frames exceed 1 GiB.
    """
    cut = {query: _until(stream, seconds) for query, stream in streams.items()}
    images = _decode_frames(cut, pictures, {query.id: query.roi for query in bundle.queries})
    engines = {query.id: make_engine(FALLBACK, bundle, query.id, "cpu") for query in bundle.queries}
    policy, store = policy_named(DEFAULT_POLICY), Store.of_bundle(bundle)
    costs = policy.view(known_costs(bundle, engines, None))
    budget = max(budget_bytes, *map(costs.alone_bytes, costs.queries))
    layouts = layouts_within(engines.values(), store.kinds, costs, budget)
    arena = Arena(store, arena_bytes(costs, budget), "cpu", budget, layouts=layouts)
    try:
        results: list[_Result] = []
        ledger = Ledger(costs.queries)
        queries = {query.id: query for query in bundle.queries}
        fps = {one.query.id: one.query.fps or DEFAULT_FPS for one in tests}
        mailboxes = Mailboxes(costs.queries, ledger)
        executor = Executor(
            Device(arena, engines, costs, budget),
            policy,
            {query: QuerySpec(rate, float(queries[query].priority)) for query, rate in fps.items()},
            mailboxes,
            Publisher(
                lambda message: _record_result(message, results, cut), ledger, queries, RunIdentity(bundle.digest)
            ),
        )
        executor.warm_up({query: next(iter(found.values())) for query, found in images.items()})
        known = executor.costs
        _play(executor, mailboxes, cut, images)
        rows = {row["query"]: row for row in ledger.to_json()}
    finally:
        arena.close()
    return _compare_clocks(tests, cut, results, rows, known, budget, seconds)


def _until(stream: Stream, seconds: float) -> Stream:
    """The first seconds of a stream."""
    count = sum(at < stream.at_s[0] + seconds for at in stream.at_s)
    delivered = tuple(moment for moment in stream.delivered if moment < count)
    return replace(
        stream, at_s=stream.at_s[:count], frames=stream.frames[:count], plays=stream.plays[:count], delivered=delivered
    )


def paste_into_frame(picture: np.ndarray, roi: Roi | None) -> np.ndarray:
    """A black camera frame with this picture in the query's region."""
    if roi is None:
        return picture
    x0, y0, x1, y1 = (round(edge) for edge in roi)
    height, width = max(y1, y0 + picture.shape[0]), max(x1, x0 + picture.shape[1])
    frame = np.zeros((height, width, 3), np.uint8)
    frame[y0 : y0 + picture.shape[0], x0 : x0 + picture.shape[1]] = picture
    return frame


def _decode_frames(
    streams: Mapping[str, Stream], pictures: Mapping[str, Sequence[np.ndarray]], rois: Mapping[str, Roi | None]
) -> dict[str, dict[int, np.ndarray]]:
    """Every delivered frame by its index in the split."""
    found: dict[str, dict[int, np.ndarray]] = {query: {} for query in streams}
    held = 0
    for query, stream in streams.items():
        for frame in dict.fromkeys(stream.frames[moment] for moment in stream.delivered):
            found[query][frame] = paste_into_frame(pictures[query][frame], rois[query])
            held += found[query][frame].nbytes
            if held > MAX_PICTURE_BYTES:
                raise InputError("--wall", "the frames of so many seconds do not fit 1 GiB", "ask for fewer seconds")
    return found


def _record_result(message: ResultMessage, results: list[_Result], streams: Mapping[str, Stream]) -> None:
    """Record a result at its frame's stream time plus its measured age."""
    query, index = message.record["query"], message.record["frame"]
    stream = streams[query]
    captured_at = stream.at_s[stream.delivered[index]]
    results.append(_Result(query, index, captured_at, captured_at + message.record["age_ms"] / 1000))


def _play(
    executor: Executor,
    mailboxes: Mailboxes,
    streams: Mapping[str, Stream],
    images: Mapping[str, Mapping[int, np.ndarray]],
) -> None:
    """Deliver every frame at its time, and step until all are processed or dropped."""
    feed = sorted(
        (stream.at_s[moment], query, index)
        for query, stream in streams.items()
        for index, moment in enumerate(stream.delivered)
    )
    ended, stopped = threading.Event(), threading.Event()

    def deliver() -> None:
        start = time.monotonic() - feed[0][0]
        for at, query, index in feed:
            if stopped.wait(max(0.0, start + at - time.monotonic())):
                break
            stream = streams[query]
            image = images[query][stream.frames[stream.delivered[index]]]
            mailboxes.put(query, Frame(index, time.monotonic(), time.time(), image))
        ended.set()
        mailboxes.wake()

    camera = threading.Thread(target=deliver, name="frames", daemon=True)
    camera.start()
    over = math.inf
    try:
        while not (ended.is_set() and not mailboxes.pending()) and time.monotonic() < over:
            if ended.is_set() and over == math.inf:
                over = time.monotonic() + DRAIN_TIMEOUT_S
            if not executor.step():
                mailboxes.wait(executor.sleep_s())
    finally:
        stopped.set()
        camera.join()


def _compare_clocks(
    tests: Sequence[QueryTest],
    streams: Mapping[str, Stream],
    results: Sequence[_Result],
    ledger: Mapping[str, Mapping[str, Any]],
    costs: Costs,
    budget: int,
    seconds: float,
) -> dict[str, Any]:
    arrivals = {query: stream.arrivals() for query, stream in streams.items()}
    virtual = simulate(costs, arrivals, budget, policy_named(DEFAULT_POLICY))
    processed = {row["id"]: row["processed"] for row in virtual.per_query()}
    queries = []
    for one in tests:
        query, scorer = one.query.id, Scorer(one, MERGED)
        own = [result for result in results if result.query == query]
        theirs = [frame for frame in virtual.frames if frame.query == query]
        wall, clock = (scorer(streams[query], latest_results(streams[query], found)) for found in (own, theirs))
        queries.append({
            "query": query, "wall": wall, "virtual": clock, "difference": wall - clock,
            "received": ledger[query]["received"], "processed_wall": ledger[query]["processed"],
            "processed_virtual": processed[query], "run_ms": 1000 * costs.queries[query].run_s,
            "age_p95_ms_wall": _p95(own), "age_p95_ms_virtual": _p95(theirs),
        })  # fmt: skip
    return {
        "seconds": seconds, "memory_bytes": budget, "machine": describe_machine("cpu"), "queries": queries,
        "difference": max((abs(row["difference"]) for row in queries), default=0.0),
    }  # fmt: skip


def _p95(results: Sequence[Any]) -> float | None:
    return age_p95_ms([one.finished_at - one.captured_at for one in results if one.finished_at is not None])
