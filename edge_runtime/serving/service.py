"""The last stage of a box: cameras, mailboxes, memory and engines at work until it is over."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.capture.camera import Camera
from edge_runtime.config import BoxConfig
from edge_runtime.engines.unshared import bound_as
from edge_runtime.equipping import EquippedBox, engines_text
from edge_runtime.frames.ledger import Ledger
from edge_runtime.frames.mailbox import Frame, Mailboxes
from edge_runtime.frames.motion import SceneChange
from edge_runtime.frames.sinks.base import Sink
from edge_runtime.memory.arena import Arena
from edge_runtime.opening import wanted
from edge_runtime.rehearsal.trace import TraceWriter
from edge_runtime.serving.device import Device, arena_bytes
from edge_runtime.serving.executor import Executor, Parts
from edge_runtime.serving.publishing import Publisher
from edge_runtime.serving.switching import Switching
from models.bundle import Bundle
from models.errors import InputError
from models.sizes import exact_text

IDLE_S = 0.1
CAMERA_PATIENCE_S = 1.0
CAMERAS_ENDED, ASKED, TIME_OVER = "cameras ended", "asked to stop", "its time was over"
UNHEARD = "nobody reads its results"

log = logging.getLogger("gemel.run")


def serve(box: EquippedBox, sinks: Sequence[Sink], stopping: threading.Event, seconds: float) -> dict[str, Any]:
    """Serve until the cameras have ended and nothing waits, `stopping` is set, or so many seconds are over.

    Returns what was done, as JSON values: the ledger, bytes moved and swaps while serving (those of warm-ups
    apart), the most bytes resident and used, what could not be written (`unwritten`, a line each), and why it
    stopped. Raises InputError where the device lacks the memory.
    """
    opened, overhead = box.fitted.box, _private_bytes()
    config, bundle = opened.config, opened.bundle
    with contextlib.ExitStack() as closing:
        arena = closing.enter_context(contextlib.closing(_allocated(box)))
        trace = closing.enter_context(contextlib.closing(TraceWriter(config.trace))) if config.trace else None
        executor, scene = _executor(box, arena, sinks, trace)
        executor.warm_up(opened.frames)
        warm_up, overflowed = {"bytes_moved": arena.bytes_moved, "swaps": arena.swaps}, _overflowed(box)
        switching = Switching(box)
        closing.callback(switching.stop)
        switching.start()
        cameras = _cameras(config, bundle, executor.parts.mailboxes, scene)
        log.info(
            "running %s, %d cameras, policy %s, order of turns: %s",
            engines_text(box.names()),
            len(cameras),
            executor.parts.policy.name,
            executor.order,
        )
        started = time.monotonic()
        with _playing(cameras):
            stopped_by = _loop(executor, switching, cameras, stopping, started + seconds)
    ledger, again = executor.publisher.ledger, switching
    return {
        **again.box.fitted.to_json(), "engines": again.box.names(),
        "seconds": round(time.monotonic() - started, 3),
        "stopped_by": stopped_by,
        "bytes_moved": arena.bytes_moved - warm_up["bytes_moved"] - again.bytes_moved,
        "swaps": arena.swaps - warm_up["swaps"] - again.swaps,
        "bytes_overflowed": _overflowed(again.box) - overflowed,
        "warm_up": {"bytes_moved": warm_up["bytes_moved"] + again.bytes_moved, "swaps": warm_up["swaps"] + again.swaps},
        "compactions": arena.compactions, "compacted_bytes": arena.compacted_bytes,
        "max_resident_bytes": arena.max_resident_bytes, "max_used_bytes": executor.device.max_used_bytes,
        "overhead_bytes": overhead, "copy_bytes_per_s": round(executor.costs.copy_bytes_per_s),
        "queries": executor.to_json(), "cameras": [camera.to_json() for camera in cameras],
        "unwritten": [*executor.publisher.unwritten, *([trace.refused] if trace and trace.refused else [])],
        "balanced": ledger.balanced, "ledger": ledger.to_json(),
    }  # fmt: skip


def _allocated(box: EquippedBox) -> Arena:
    config = box.fitted.box.config
    size = arena_bytes(box.costs, config.budget_bytes)
    try:
        return Arena(box.store, size, config.device, config.budget_bytes, layouts=box.layouts)
    except (RuntimeError, MemoryError) as error:
        fault = f"the device {config.device} has no {exact_text(size)} for weights"
        raise InputError(config.path, fault, "give a smaller budget", "budget") from error


def _executor(
    box: EquippedBox, arena: Arena, sinks: Sequence[Sink], trace: TraceWriter | None
) -> tuple[Executor, SceneChange]:
    """The executor, and what tells it how urgent queries are."""
    opened = box.fitted.box
    bundle, demands, ledger = opened.bundle, opened.demands(), Ledger(box.costs.queries)
    scene = SceneChange({query: demand.urgency for query, demand in demands.items()})
    parts = Parts(
        Device(arena, bound_as(box.engines, box.costs), box.costs, opened.config.budget_bytes),
        box.fitted.policy,
        demands,
        Mailboxes(box.costs.queries, ledger, heard=_teller(trace)),
        Publisher(sinks, ledger, {query.id: query for query in bundle.queries}, bundle.digest, opened.damaged),
        scene.urgency,
        trace,
    )
    return Executor(parts), scene


def _teller(trace: TraceWriter | None) -> Callable[[str, Frame], None] | None:
    """What tells a trace of every frame that arrives."""
    if trace is None:
        return None
    return lambda query, frame: trace.frame(query, frame.captured_at, time.monotonic())


def _cameras(config: BoxConfig, bundle: Bundle, mailboxes: Mailboxes, scene: SceneChange) -> list[Camera]:
    def put(query: str, frame: Frame) -> None:
        if frame.image is not None:
            scene.saw(query, frame.captured_at, frame.image)
        mailboxes.put(query, frame)

    cameras = []
    for one in config.cameras.values():
        queries = {query.id: wanted(query) for query in bundle.queries if query.camera == one.id}
        if queries:
            cameras.append(Camera(one, queries, put, ended=mailboxes.nudge))
    return cameras


@contextlib.contextmanager
def _playing(cameras: Sequence[Camera]) -> Iterator[None]:
    """The cameras play while this lasts."""
    for camera in cameras:
        camera.start()
    try:
        yield
    finally:
        for camera in cameras:
            camera.stop()
        until = time.monotonic() + CAMERA_PATIENCE_S
        left = [camera.id for camera in cameras if not camera.join(max(0.0, until - time.monotonic()))]
        if left:
            log.warning("these cameras did not stop in time: %s", ", ".join(left))


def _loop(
    executor: Executor, switching: Switching, cameras: Sequence[Camera], stopping: threading.Event, ends: float
) -> str:
    """Work until asked to stop, until the clock says `ends`, or until all cameras have ended and nothing waits."""
    mailboxes = executor.parts.mailboxes
    while not stopping.is_set():
        if time.monotonic() >= ends:
            return TIME_OVER
        if executor.publisher.unheard:
            return UNHEARD
        switching.take_up(executor)
        over = not any(camera.alive for camera in cameras)
        if executor.step():
            continue
        if over and not mailboxes.pending():
            return CAMERAS_ENDED
        mailboxes.wait(IDLE_S)
    return ASKED


def _overflowed(box: EquippedBox) -> int:
    return sum(engine.overflow_bytes for engine in box.engines.values())


def _private_bytes() -> int | None:
    """Memory of this process that is not a mapped file, as far as the system tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
