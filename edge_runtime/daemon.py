"""The edge daemon: cameras, mailboxes, schedule, memory, engines and results of one box, wired together."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.config import BoxConfig, load_config
from edge_runtime.engines import Engine, FrameEngine, make_engine
from edge_runtime.engines.arranging import layouts_for, occupying, order_for
from edge_runtime.engines.choosing import FALLBACK, engines_for
from edge_runtime.engines.unshared import UnsharedEngine, store_for
from edge_runtime.executor import Executor, arena_bytes
from edge_runtime.fitting import Fitted, fitted, usable_profile
from edge_runtime.frames.cameras import Camera
from edge_runtime.frames.ledger import Ledger
from edge_runtime.frames.mailbox import Frame, Mailboxes
from edge_runtime.frames.motion import SceneChange
from edge_runtime.frames.sinks.base import Sink
from edge_runtime.frames.sources import probe
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.layout import Order
from edge_runtime.memory.soundness import damaged_queries
from edge_runtime.memory.store import Store
from edge_runtime.policies import policy_named
from edge_runtime.rehearsal.trace import TraceWriter
from edge_runtime.schedule import Demand, Policy
from edge_runtime.schedule.costs import Costs, all_bytes
from models.bundle import Bundle, open_bundle
from models.errors import BundleError, InputError
from models.files.atomic import writing

if TYPE_CHECKING:
    import numpy as np

IDLE_S = 0.1
CAMERA_PATIENCE_S = 2.0
LEDGER_FILE = "ledger.json"
UNKNOWN_FPS = 10.0
CAMERAS_ENDED, ASKED, TIME_OVER = "cameras ended", "asked to stop", "its time was over"

log = logging.getLogger("gemel.run")


def run(
    config_path: str | Path, check: bool = False, stop: threading.Event | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Run the box until its cameras have ended, it has served for so many seconds, `stop` is set, or SIGINT or SIGTERM
    comes; returns the summary.

    The summary holds the ledger per query, the bytes moved and swaps while serving (those of the warm-up apart),
    the most bytes resident and used, and why the box stopped; it is also logged and written to
    `SPOOL/ledger.json`. With `check` everything is validated, cameras and the fit included, nothing runs, and the
    summary says what would. Raises InputError (one line: file, key, fault, remedy) before anything is allocated
    when the config, the bundle or a camera is faulty or when a query does not fit the budget even alone, or with
    `stream: true` not even with its layers streamed.
    """
    config = load_config(config_path)
    bundle, damaged = _open(config)
    _check_cameras(config, bundle)
    frames = {
        camera: probe(one.source, str(config.path), f"cameras.{camera}.source")
        for camera, one in config.cameras.items()
        if any(query.camera == camera for query in bundle.queries)
    }
    _check_regions(config, bundle, frames)
    policy = policy_named(config.policy, str(config.path), "policy")
    # Whether the bundle fits is known without preparing engines, which may take minutes.
    plain = {query.id: make_engine(FALLBACK, bundle, query.id, config.device) for query in bundle.queries}
    profile = usable_profile(config, bundle)
    fit = fitted(config, bundle, plain, profile)
    if check:
        return {"ok": True, **_plan(config, bundle, fit, policy, damaged)}
    streamed, stays = fit.within.tensors, all_bytes(policy.view(fit.within.costs)) <= config.budget_bytes
    engines = engines_for(bundle, config.engine, config.device, config.precision, stays, streamed)
    fit = fitted(config, bundle, {**engines, **{query: plain[query] for query in streamed}}, profile)
    for query in fit.within.tensors.keys() - streamed.keys():
        fault = f"query '{query}' fits the budget on engine {FALLBACK}, not on {engines[query].name}"
        raise InputError(config.path, fault, f"use engine {FALLBACK}", "engine")
    for query, nbytes in fit.within.run_bytes.items():
        log.info("query %s streams: %d bytes are copied in every run", query, nbytes)
    costs = policy.view(fit.within.costs)
    summary = {
        **_plan(config, bundle, fit, policy, damaged),
        "engines": {query: one.name for query, one in engines.items()},
    }
    stopping = stop or threading.Event()
    with contextlib.ExitStack() as closing:
        reasons = closing.enter_context(_signals(stopping))
        sinks = [closing.enter_context(contextlib.closing(sink.open())) for sink in config.sinks]
        summary |= _serve(config, bundle, engines, costs, frames, sinks, stopping, seconds, damaged)
        summary["stopped_by"] = reasons[0] if reasons else summary["stopped_by"]
    log.info("ledger: %s", json.dumps(summary))
    if config.spool is not None:
        with writing(config.spool / LEDGER_FILE, overwrite=True) as file:
            file.write(json.dumps(summary, indent=2).encode())
    return summary


def _serve(
    config: BoxConfig,
    bundle: Bundle,
    engines: dict[str, FrameEngine],
    costs: Costs,
    frames: dict[str, np.ndarray],
    sinks: list[Sink],
    stopping: threading.Event,
    seconds: float,
    damaged: Mapping[str, str],
) -> dict[str, Any]:
    overhead = _private_bytes()
    arena, costs = _allocate(config, bundle, costs, engines)
    policy, demands = policy_named(config.policy), _demands(config, bundle)
    trace = TraceWriter(config.trace) if config.trace else None
    ledger = Ledger(costs.queries)
    mailboxes = Mailboxes(costs.queries, ledger, heard=_teller(trace))
    scene = SceneChange({query: demand.urgency for query, demand in demands.items()})
    bound: Mapping[str, Engine] = (
        engines if policy.view(costs) is costs else {query: UnsharedEngine(engine) for query, engine in engines.items()}
    )
    executor = Executor(
        arena,
        bound,
        costs,
        config.budget_bytes,
        policy,
        demands,
        mailboxes,
        ledger,
        sinks,
        bundle.digest,
        damaged=damaged,
        urgency=scene.urgency,
        trace=trace,
    )
    executor.warm_up({query.id: frames[query.camera] for query in bundle.queries})
    warm_up, streamed_before = {"bytes_moved": arena.bytes_moved, "swaps": arena.swaps}, _streamed(engines)
    cameras = _cameras(config, bundle, mailboxes, scene)
    log.info(
        "running %d queries on %d cameras, policy %s, order of turns: %s",
        len(engines),
        len(cameras),
        policy.name,
        executor.order,
    )
    started = time.monotonic()
    for camera in cameras:
        camera.start()
    try:
        stopped_by = _loop(executor, cameras, stopping, started + seconds)
    finally:
        for camera in cameras:
            camera.stop()
        left = [camera.id for camera in cameras if not camera.join(CAMERA_PATIENCE_S)]
        arena.close()
        if trace is not None:
            trace.close()
    if left:
        log.warning("these cameras did not stop in time: %s", ", ".join(left))
    return {
        "seconds": round(time.monotonic() - started, 3),
        "stopped_by": stopped_by,
        "bytes_moved": arena.bytes_moved - warm_up["bytes_moved"], "swaps": arena.swaps - warm_up["swaps"],
        "bytes_streamed": _streamed(engines) - streamed_before,
        "warm_up": warm_up, "compactions": arena.compactions, "compacted_bytes": arena.compacted_bytes,
        "max_resident_bytes": arena.max_resident_bytes, "max_used_bytes": executor.max_used_bytes,
        "overhead_bytes": overhead, "copy_bytes_per_s": round(executor.costs.copy_bytes_per_s),
        "queries": executor.to_json(), "cameras": [camera.to_json() for camera in cameras],
        "balanced": ledger.balanced, "ledger": ledger.to_json(),
    }  # fmt: skip


def _streamed(engines: Mapping[str, FrameEngine]) -> int:
    return sum(engine.streamed_bytes for engine in engines.values())


def _loop(executor: Executor, cameras: list[Camera], stopping: threading.Event, ends: float) -> str:
    """Work until asked to stop, until the clock says `ends`, or until all cameras have ended and nothing waits."""
    while not stopping.is_set():
        if time.monotonic() >= ends:
            return TIME_OVER
        over = not any(camera.alive for camera in cameras)
        if executor.step():
            continue
        if over and not executor.mailboxes.pending():
            return CAMERAS_ENDED
        executor.mailboxes.wait(IDLE_S)
    return ASKED


def _open(config: BoxConfig) -> tuple[Bundle, dict[str, str]]:
    """Open the bundle and rehash it: damage to some queries' tensors leaves the others running."""
    bundle = open_bundle(config.bundle, config.factories, config.path.resolve().parent)
    damaged = damaged_queries(bundle)
    for query, reason in damaged.items():
        log.error("query %s is out: %s; copy the bundle again", query, reason)
    if len(damaged) == len(bundle.queries):
        fault = f"every query has damaged tensors: {next(iter(damaged.values()))}"
        raise BundleError(config.bundle, fault, "copy or build the bundle again")
    return bundle, damaged


def _check_cameras(config: BoxConfig, bundle: Bundle) -> None:
    for query in bundle.queries:
        if query.camera not in config.cameras:
            fault = f"query '{query.id}' of the bundle needs a camera '{query.camera}'"
            raise InputError(config.path, fault, f"add `{query.camera}: {{source: ...}}`", "cameras")
    for camera in config.cameras.keys() - {query.camera for query in bundle.queries}:
        log.warning("camera %s is not opened: no query of the bundle uses it", camera)


def _check_regions(config: BoxConfig, bundle: Bundle, frames: Mapping[str, np.ndarray]) -> None:
    for query in bundle.queries:
        height, width = frames[query.camera].shape[:2]
        if query.roi is not None and (round(query.roi[0]) >= width or round(query.roi[1]) >= height):
            fault = f"query '{query.id}' looks at {list(query.roi)}, outside frames of {width}x{height} pixels"
            raise InputError(config.path, fault, "give the camera it was made for", f"cameras.{query.camera}.source")


def _demands(config: BoxConfig, bundle: Bundle) -> dict[str, Demand]:
    """What each query asks for: the lower of its own and its camera's rate, and its priority."""
    demands = {}
    for query in bundle.queries:
        rates = [fps for fps in (query.fps, config.cameras[query.camera].fps) if fps]
        demands[query.id] = Demand(min(rates, default=UNKNOWN_FPS), float(query.priority))
    return demands


def _teller(trace: TraceWriter | None) -> Callable[[str, Frame], None] | None:
    """What tells a trace of every frame that arrives."""
    if trace is None:
        return None
    return lambda query, frame: trace.frame(query, frame.captured_at, time.monotonic())


def _plan(config: BoxConfig, bundle: Bundle, fit: Fitted, policy: Policy, damaged: Mapping[str, str]) -> dict[str, Any]:
    """What is known before the start: what is needed, whether all of it can stay resident, and what streams."""
    costs = policy.view(fit.whole)
    return {
        "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
        "budget_bytes": config.budget_bytes, "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()),
        "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
        "damaged": damaged, "fits": all_bytes(costs) <= config.budget_bytes,
        "least_budget_bytes": max(map(costs.alone_bytes, costs.queries)), "streamed_bytes": fit.within.run_bytes,
    }  # fmt: skip


def _allocate(
    config: BoxConfig, bundle: Bundle, costs: Costs, engines: Mapping[str, FrameEngine]
) -> tuple[Arena, Costs]:
    """The arena, and the costs with what tensors occupy in it."""
    store, running = store_for(Store.of_bundle(bundle), costs), engines.values()
    order = order_for(running, all_bytes(costs) <= config.budget_bytes)
    layouts = layouts_for(running, store.kinds, order)
    if all_bytes(occupying(costs, layouts)) > config.budget_bytes >= all_bytes(costs):  # blocks need some room
        layouts = layouts_for(running, store.kinds, min(order, Order.CHANNELS_LAST))
    costs = occupying(costs, layouts)
    size = arena_bytes(costs, config.budget_bytes)
    try:
        return Arena(store, size, config.device, config.budget_bytes, layouts=layouts), costs
    except (RuntimeError, MemoryError) as error:
        fault = f"the device {config.device} has no {size} bytes for weights"
        raise InputError(config.path, fault, "give a smaller budget", "budget") from error


def _cameras(config: BoxConfig, bundle: Bundle, mailboxes: Mailboxes, scene: SceneChange) -> list[Camera]:
    def put(query: str, frame: Frame) -> None:
        if frame.image is not None:
            scene.saw(query, frame.captured_at, frame.image)
        mailboxes.put(query, frame)

    cameras = []
    for one in config.cameras.values():
        queries = {query.id: query.fps for query in bundle.queries if query.camera == one.id}
        if queries:
            cameras.append(Camera(one.id, one.source, one.fps, queries, put, one.loop, ended=mailboxes.nudge))
    return cameras


@contextlib.contextmanager
def _signals(stopping: threading.Event) -> Iterator[list[str]]:
    """Let SIGINT and SIGTERM set `stopping`, and note which came; only possible in the main thread."""
    reasons: list[str] = []

    def note(number: int, _: object) -> None:
        reasons.append(signal.Signals(number).name)
        stopping.set()

    if threading.current_thread() is not threading.main_thread():
        yield reasons
        return
    before: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
        yield reasons
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _private_bytes() -> int | None:
    """Memory of this process that is not a mapped file, as far as the system tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
