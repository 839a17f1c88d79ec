"""The last stage of a box: cameras, mailboxes, memory and engines at work until it is over."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.capture.camera import Camera
from edge_runtime.config import BoxConfig
from edge_runtime.delivery.parcel import Parcel
from edge_runtime.delivery.post import Post
from edge_runtime.engines.unshared import bound_as
from edge_runtime.equipping import EquippedBox
from edge_runtime.frames.ledger import Ledger
from edge_runtime.frames.mailbox import Frame, Mailboxes
from edge_runtime.frames.motion import SceneChange
from edge_runtime.frames.results import Identity
from edge_runtime.memory.arena import Arena
from edge_runtime.opening import wanted
from edge_runtime.rehearsal.trace import TraceWriter
from edge_runtime.serving.device import Device, arena_bytes
from edge_runtime.serving.executor import Executor, Parts, Turn
from edge_runtime.serving.inference import ASKED, Inference
from edge_runtime.serving.ledger_file import LedgerFile
from edge_runtime.serving.notifying import ALIVE, READY, STOPPING, Notifier
from edge_runtime.serving.publishing import Publisher
from edge_runtime.serving.signals import Asked
from edge_runtime.serving.switching import Switching
from edge_runtime.serving.watchdog import LOOK_S, Watchdog
from edge_runtime.spool.spool import Spool
from models.bundle import Bundle
from models.errors import InputError
from models.sizes import exact_text

if TYPE_CHECKING:
    from edge_runtime.serving.watched import Observer
    from edge_runtime.watching.service import HttpService

STEP_S, CAMERAS_S, POST_S, LEDGER_S = 1.2, 0.4, 1.0, 0.8
"""How long each of these is waited for at the end, one after the other: within 5 seconds the process is gone."""
LEISURE_S = 10.0
"""How long the post may take to deliver what waits where nobody asked the box to stop."""

log = logging.getLogger("gemel.run")


def serve(box: EquippedBox, post: Post, asked: Asked, seconds: float, ledger_file: LedgerFile) -> dict[str, Any]:
    """Serve until the cameras have ended and nothing waits, the box is asked to stop, so many seconds are over, or
    something is at fault; nothing that hangs is waited for.

    Returns what was done, as JSON values: the ledger, bytes moved and swaps while serving (those of warm-ups apart),
    the most bytes resident and used, what could not be written (`unwritten`, a line each), why it stopped, the `fault`
    if that was one, and what is `hanging`. The same is written to the ledger's file now and then, and at the end
    whatever comes between. Raises InputError where the device lacks the memory.
    """
    serving = Serving(box, post, asked, ledger_file)
    try:
        serving.start(seconds)
        serving.oversee()
    finally:
        summary = serving.end()
    return summary


class Serving:
    """All that is at work in a box, overseen from the thread that called for it."""

    def __init__(self, box: EquippedBox, post: Post, asked: Asked, ledger_file: LedgerFile) -> None:
        self._post, self._asked, self._ledger_file = post, asked, ledger_file
        opened, self._overhead = box.fitted.box, _private_bytes()
        config, self._frames = opened.config, opened.frames
        self._arena = _allocated(box)
        self._trace = TraceWriter(config.trace) if config.trace else None
        self._identity = Identity(opened.bundle.digest)
        self._observer = None if config.http is None else _observer(opened.bundle)
        self._spool = None
        if config.spool is not None:
            self._spool = Spool(config.spool, {query.id: query for query in opened.bundle.queries})
        heard = _Heard(post, self._observer, self._spool, config.late == "publish")
        executor, scene = _executor(box, self._arena, self._trace, self._identity, heard)
        cameras = _cameras(config, opened.bundle, executor.parts.mailboxes, scene, self._observer)
        self._inference = Inference(executor, Switching(box), cameras, asked.stopping, lambda: post.is_unheard)
        self._notifier, self._is_ready, self._alive_at = Notifier(), False, 0.0
        self._http: HttpService | None = None
        if self._observer is not None and config.http is not None:
            from edge_runtime.serving.watched import WatchedBox
            from edge_runtime.watching.service import HttpService

            watched = WatchedBox(opened, self._identity, self._inference, post, self._observer, self._spool)
            self._http = HttpService(watched, self._observer.measures, config.http, config.path)
        self._ended: float | None = None
        self._fault: str | None = None
        self._hanging: list[str] = []
        self._unwritten: list[str] = []

    def start(self, seconds: float) -> None:
        """Begin to serve, for so many seconds."""
        if self._http is not None:
            self._http.start()
        self._ledger_file.start()
        if self._spool is not None:
            self._spool.start()
        self._post.start()
        self._inference.start(self._frames, seconds)

    def oversee(self) -> None:
        """Look after what is at work until it is over, something hangs, or the box is asked to stop."""
        watchdog, inference = Watchdog(), self._inference
        while not inference.over.wait(LOOK_S):
            self._tell_manager()
            if self._asked.stopping.is_set():
                return
            if self._asked.reopening.is_set():
                self._asked.reopening.clear()
                log.info("files are opened anew")
                self._post.reopen()
            self._fault = watchdog.looks(inference.executor.doing, time.monotonic())
            if self._fault is not None:
                log.error("%s: the box ends", self._fault)
                return
            if self._ledger_file.is_due():
                self._ledger_file.write(self.summary())

    def _tell_manager(self) -> None:
        """That it serves, once it does, and that it is alive, as often as the service manager wants to hear it."""
        now, every_s = time.monotonic(), self._notifier.alive_every_s
        if not self._is_ready and self._inference.began is not None:
            self._is_ready = True
            self._notifier.tell(READY)
        if every_s is not None and now >= self._alive_at:
            self._alive_at = now + every_s
            self._notifier.tell(ALIVE)

    def end(self) -> dict[str, Any]:
        """Let everything end, without waiting long for anything, and write the ledger; returns the summary."""
        self._ended = time.monotonic()
        self._notifier.tell(STOPPING)
        inference, asked = self._inference, self._asked
        by_itself = inference.over.is_set() and not asked.stopping.is_set()
        asked.stopping.set()
        inference.executor.parts.mailboxes.nudge()
        try:
            for camera in inference.cameras:
                camera.stop()
            if self._fault or not inference.join(STEP_S):
                self._hanging.append("the inference")
            self._fault = self._fault or inference.fault
            ends = time.monotonic() + CAMERAS_S
            dead = [one for one in inference.cameras if one.alive and not one.join(max(0.0, ends - time.monotonic()))]
            self._hanging += [f"camera {camera.id}" for camera in dead]
            self._close(by_itself)
        finally:
            summary = self.summary()
            written = self._ledger_file.finish(summary, LEDGER_S)
        if self._ledger_file.refused is not None:
            summary["unwritten"].append(self._ledger_file.refused)
        if not written:
            summary["hanging"].append("the ledger")
        if summary["hanging"]:
            log.warning("not waited for: %s", ", ".join(summary["hanging"]))
        return summary

    def _close(self, by_itself: bool) -> None:
        closing: list[tuple[str, Callable[[], object]]] = [("the measuring of engines", self._inference.switching.stop)]
        if self._trace is not None:
            closing.append(("the trace", self._trace.close))
        if self._http is not None:
            closing.append(("HTTP", self._http.stop))
        if self._spool is not None:
            closing.append(("the spool", self._spool.stop))
        threads = [(name, threading.Thread(target=close, daemon=True)) for name, close in closing]
        for _, thread in threads:
            thread.start()
        ends = time.monotonic() + POST_S
        self._hanging += self._post.close(LEISURE_S if by_itself else POST_S)
        for name, thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                self._hanging.append(name)
        if not self._hanging:  # what hangs may still use it
            self._arena.close()
        self._unwritten += self._post.complaints
        if self._trace is not None and self._trace.refused:
            self._unwritten.append(self._trace.refused)

    def summary(self) -> dict[str, Any]:
        """What was done so far."""
        inference, arena, executor = self._inference, self._arena, self._inference.executor
        again, warmed, ledger = inference.switching, inference.warmed, executor.publisher.ledger
        began = inference.began
        return {
            **again.box.fitted.to_json(), "run": self._identity.run, "engines": again.box.names(),
            "seconds": 0.0 if began is None else round((self._ended or time.monotonic()) - began, 3),
            "stopped_by": self._stopped_by(), "fault": self._fault, "hanging": list(self._hanging),
            "bytes_moved": arena.bytes_moved - warmed["bytes_moved"] - again.bytes_moved,
            "swaps": arena.swaps - warmed["swaps"] - again.swaps,
            "bytes_overflowed": _overflowed(again.box) - inference.overflowed,
            "warm_up": {"bytes_moved": warmed["bytes_moved"] + again.bytes_moved,
                        "swaps": warmed["swaps"] + again.swaps},
            "compactions": arena.compactions, "compacted_bytes": arena.compacted_bytes,
            "max_resident_bytes": arena.max_resident_bytes, "max_used_bytes": executor.device.max_used_bytes,
            "max_waiting_bytes": executor.parts.mailboxes.max_bytes, "most_waiting_bytes":
                executor.parts.mailboxes.most_bytes,
            "overhead_bytes": self._overhead, "copy_bytes_per_s": round(executor.costs.copy_bytes_per_s),
            "queries": executor.to_json(), "cameras": [camera.to_json() for camera in inference.cameras],
            "sinks": self._post.to_json(), "spool": None if self._spool is None else self._spool.to_json(),
            "unwritten": list(self._unwritten),
            "balanced": ledger.balanced, "ledger": ledger.to_json(),
        }  # fmt: skip

    def _stopped_by(self) -> str | None:
        """Why it stopped; None while it runs."""
        if self._asked.reasons:
            return self._asked.reasons[0]
        if self._fault is not None:
            return "a fault"
        if self._inference.over.is_set():
            return self._inference.ended_by
        return ASKED if self._asked.stopping.is_set() else None


def _observer(bundle: Bundle) -> Observer:
    """Imported where a box is watched: the libraries of HTTP take half a second."""
    from edge_runtime.serving.watched import Observer

    return Observer(bundle)


class _Heard:
    """Who hears of results and turns: the post, of late ones if it `takes_late`, the observer where the box is watched,
    the spool where it has one.
    """

    def __init__(self, post: Post, observer: Observer | None, spool: Spool | None, takes_late: bool) -> None:
        self._post, self._observer, self._spool, self._takes_late = post, observer, spool, takes_late

    def answered(self, parcel: Parcel) -> None:
        if self._observer is not None:
            self._observer.answered(parcel)
        if self._spool is not None:
            self._spool.offer(parcel)
        if self._takes_late or not parcel.record["late"]:
            self._post.offer(parcel)

    def took(self, query: str, turn: Turn) -> None:
        if self._observer is not None:
            self._observer.took(query, turn)


def _allocated(box: EquippedBox) -> Arena:
    config = box.fitted.box.config
    size = arena_bytes(box.costs, config.budget_bytes)
    try:
        return Arena(box.store, size, config.device, config.budget_bytes, layouts=box.layouts)
    except (RuntimeError, MemoryError) as error:
        fault = f"the device {config.device} has no {exact_text(size)} for weights"
        raise InputError(config.path, fault, "give a smaller budget", "budget") from error


def _executor(
    box: EquippedBox, arena: Arena, trace: TraceWriter | None, identity: Identity, heard: _Heard
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
        Publisher(heard.answered, ledger, {query.id: query for query in bundle.queries}, identity, opened.damaged),
        scene.urgency,
        trace,
        heard.took,
    )
    return Executor(parts), scene


def _teller(trace: TraceWriter | None) -> Callable[[str, Frame], None] | None:
    """What tells a trace of every frame that arrives."""
    if trace is None:
        return None
    return lambda query, frame: trace.frame(query, frame.captured_at, time.monotonic())


def _cameras(
    config: BoxConfig, bundle: Bundle, mailboxes: Mailboxes, scene: SceneChange, observer: Observer | None
) -> list[Camera]:
    def put(query: str, frame: Frame) -> None:
        if observer is not None:
            observer.saw(query, frame)
        if frame.image is not None:
            scene.saw(query, frame.captured_at, frame.image)
        mailboxes.put(query, frame)

    cameras = []
    for one in config.cameras.values():
        queries = {query.id: wanted(query) for query in bundle.queries if query.camera == one.id}
        if queries:
            cameras.append(Camera(one, queries, put, ended=mailboxes.nudge))
    return cameras


def _overflowed(box: EquippedBox) -> int:
    return sum(engine.overflow_bytes for engine in box.engines.values())


def _private_bytes() -> int | None:
    """Memory of this process that is not a mapped file, as far as the system tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
