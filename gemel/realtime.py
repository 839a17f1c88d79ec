"""The merged queries on this machine in real time, beside the virtual clock with the costs measured here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from gemel.edge_runtime.box import known_costs
from gemel.edge_runtime.device import Device, arena_bytes
from gemel.edge_runtime.engines.layouts import layouts_within
from gemel.edge_runtime.engines.registry import FALLBACK, make_engine
from gemel.edge_runtime.executor import Executor
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.policies import DEFAULT_POLICY, policy_named
from gemel.edge_runtime.queues import Frame, Ledger, Mailboxes
from gemel.edge_runtime.results import Publisher, RunIdentity
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.simulation.profile_io import describe_machine
from gemel.edge_runtime.simulation.simulator import FrameOutcome, Simulation, age_p95_ms, simulate
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from gemel.models.preprocess import Region
from gemel.report.document import MERGED, Realtime, RealtimeRow
from gemel.stream_eval import QueryTest, Scorer, Stream, latest_results

DEFAULT_FPS = 10.0
MAX_PICTURE_BYTES = 2**30
"""Of all decoded frames, which are held in memory."""
DRAIN_TIMEOUT_S = 5.0


def evaluate_realtime(
    bundle: Bundle,
    tests: Sequence[QueryTest],
    pictures: Mapping[str, Sequence[np.ndarray]],
    streams: Mapping[str, Stream],
    budget_bytes: int,
    seconds: float,
) -> Realtime:
    """Run the first seconds of these streams on this machine, and on the virtual clock with the costs measured here.

    `pictures` are each query's input frames, RGB uint8 (H, W, 3). The box's own warm-up measures the costs; the budget
    grows to the largest query if its workspace needs that. Per query: streaming accuracy, frames processed and p95 age
    by both clocks. Raises InputError if the decoded frames exceed 1 GiB.
    """
    cut = {query: _shorten(stream, seconds) for query, stream in streams.items()}
    queries = {query.id: query for query in bundle.queries}
    images = _decode_frames(cut, pictures, {query: one.region for query, one in queries.items()})
    engines = {query: make_engine(FALLBACK, bundle, query, "cpu") for query in queries}
    policy, store = policy_named(DEFAULT_POLICY), Store.of_bundle(bundle)
    costs = policy.view(known_costs(bundle, engines, None))
    budget = max(budget_bytes, *map(costs.alone_bytes, costs.queries))
    layouts = layouts_within(engines.values(), store.kinds, costs, budget)
    ledger, results = Ledger(costs.queries), list[FrameOutcome]()
    specs = {one.query.id: QuerySpec(one.query.fps or DEFAULT_FPS, float(one.query.priority)) for one in tests}

    def record(message: ResultMessage) -> None:
        """Record a result at its frame's stream time plus its measured age."""
        query, index = message.record["query"], message.record["frame"]
        captured_at = cut[query].at_s[cut[query].delivered[index]]
        finished_at = captured_at + message.record["age_ms"] / 1000
        results.append(FrameOutcome(query, index, captured_at, finished_at=finished_at))

    arena = Arena(store, arena_bytes(costs, budget), "cpu", budget, layouts=layouts)
    try:
        mailboxes = Mailboxes(costs.queries, ledger)
        publisher = Publisher(record, ledger, queries, RunIdentity(bundle.digest))
        executor = Executor(Device(arena, engines, costs, budget), policy, specs, mailboxes, publisher)
        executor.warm_up({query: next(iter(found.values())) for query, found in images.items()})
        known = executor.costs
        _play(executor, mailboxes, cut, images)
    finally:
        arena.close()
    rows = _compare_clocks(tests, cut, results, ledger, simulate(
        known, {query: stream.arrivals() for query, stream in cut.items()}, budget, policy_named(DEFAULT_POLICY)
    ))  # fmt: skip
    difference = max((abs(row.difference) for row in rows), default=0.0)
    machine = describe_machine("cpu")
    return Realtime(seconds=seconds, memory_bytes=budget, machine=machine, queries=rows, difference=difference)


def _shorten(stream: Stream, seconds: float) -> Stream:
    """The first seconds of a stream."""
    count = sum(at < stream.at_s[0] + seconds for at in stream.at_s)
    delivered = tuple(moment for moment in stream.delivered if moment < count)
    return Stream(stream.at_s[:count], stream.frames[:count], stream.plays[:count], delivered)


def paste_into_frame(picture: np.ndarray, region: Region) -> np.ndarray:
    """A black camera frame with this picture in the query's region."""
    if region.roi is None:
        return picture
    (high, wide), parts = picture.shape[:2], region.fractions
    if parts is None:
        x0, y0, x1, y1 = region.pixels((0, 0))
        width, height = max(x1, x0 + wide), max(y1, y0 + high)
    else:
        width, height = round(wide / (parts[2] - parts[0])), round(high / (parts[3] - parts[1]))
        x0, y0, *_ = region.pixels((width, height))
    frame = np.zeros((height, width, 3), np.uint8)
    place = frame[y0 : y0 + high, x0 : x0 + wide]
    place[:] = picture[: place.shape[0], : place.shape[1]]
    return frame


def _decode_frames(
    streams: Mapping[str, Stream], pictures: Mapping[str, Sequence[np.ndarray]], regions: Mapping[str, Region]
) -> dict[str, dict[int, np.ndarray]]:
    """Every delivered frame by its index in the split."""
    found: dict[str, dict[int, np.ndarray]] = {query: {} for query in streams}
    held = 0
    for query, stream in streams.items():
        for frame in dict.fromkeys(stream.frames[moment] for moment in stream.delivered):
            found[query][frame] = paste_into_frame(pictures[query][frame], regions[query])
            held += found[query][frame].nbytes
            if held > MAX_PICTURE_BYTES:
                raise InputError("--wall", "the frames of so many seconds do not fit 1 GiB", "ask for fewer seconds")
    return found


def _play(
    executor: Executor,
    mailboxes: Mailboxes,
    streams: Mapping[str, Stream],
    images: Mapping[str, Mapping[int, np.ndarray]],
) -> None:
    """Deliver every frame at its time, and step until all are processed or dropped."""
    feed = sorted(
        (stream.at_s[moment], query, index, stream.frames[moment])
        for query, stream in streams.items()
        for index, moment in enumerate(stream.delivered)
    )
    ended, stopped = threading.Event(), threading.Event()

    def deliver() -> None:
        start = time.monotonic() - feed[0][0]
        for at, query, index, frame in feed:
            if stopped.wait(max(0.0, start + at - time.monotonic())):
                break
            mailboxes.put(query, Frame(index, time.monotonic(), time.time(), images[query][frame]))
        ended.set()
        mailboxes.wake()

    camera = threading.Thread(target=deliver, name="frames", daemon=True)
    camera.start()
    last = math.inf
    try:
        while not (ended.is_set() and not mailboxes.pending()) and time.monotonic() < last:
            if ended.is_set() and last == math.inf:
                last = time.monotonic() + DRAIN_TIMEOUT_S
            if not executor.step():
                mailboxes.wait(executor.sleep_s())
    finally:
        stopped.set()
        camera.join()


def _compare_clocks(
    tests: Sequence[QueryTest],
    streams: Mapping[str, Stream],
    results: Sequence[FrameOutcome],
    ledger: Ledger,
    virtual: Simulation,
) -> list[RealtimeRow]:
    counts = {row["query"]: row for row in ledger.to_json()}
    processed = {row["id"]: row["processed"] for row in virtual.per_query()}
    rows = []
    for one in tests:
        query, scorer = one.query.id, Scorer(one, MERGED)
        real, simulated = ([frame for frame in found if frame.query == query] for found in (results, virtual.frames))
        wall, clock = (scorer(streams[query], latest_results(streams[query], own)) for own in (real, simulated))
        rows.append(RealtimeRow(
            query=query, wall=wall, virtual=clock, difference=wall - clock, received=counts[query]["received"],
            processed_wall=counts[query]["processed"], processed_virtual=processed[query],
            run_ms=1000 * virtual.costs.queries[query].run_s, age_p95_ms_wall=_p95(real),
            age_p95_ms_virtual=_p95(simulated),
        ))  # fmt: skip
    return rows


def _p95(results: Sequence[FrameOutcome]) -> float | None:
    return age_p95_ms([one.finished_at - one.captured_at for one in results if one.finished_at is not None])
