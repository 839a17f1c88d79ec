"""The service: starts and oversees all that serves a box, answers signals, and ends within five seconds."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.arrivals.sent_models import ArrivedModels
from gemel.edge_runtime.capture.reconnect import CameraPhase
from gemel.edge_runtime.frames.results import BUNDLE_DIGITS
from gemel.edge_runtime.frames.samples import Spool
from gemel.edge_runtime.life.box import ReadyBox
from gemel.edge_runtime.life.config import DetectorPortConfig
from gemel.edge_runtime.life.executor import WATCH_INTERVAL_S, Watchdog
from gemel.edge_runtime.life.inference import InferenceThread, StopReason
from gemel.edge_runtime.life.load_monitor import LoadMonitor
from gemel.edge_runtime.life.reload import BuildBox, ReloadManager
from gemel.edge_runtime.life.runtime import Runtime
from gemel.edge_runtime.sinks.base import BoxState
from gemel.edge_runtime.sinks.worker import SinkManager
from gemel.edge_runtime.updates.updater import UpdateFolder, Updater
from gemel.models.errors import InputError, one_line
from gemel.models.files.io import open_atomic
from gemel.models.measures.agreement import BELOW
from gemel.models.process import freeze_garbage_collector, installed_version, name_threads, private_bytes, trim_heap

if TYPE_CHECKING:
    from gemel.edge_runtime.arrivals.detector_port import DetectorPort
    from gemel.edge_runtime.http.app import HttpService
    from gemel.edge_runtime.http.snapshots import Observer
    from gemel.edge_runtime.life.live_status import RuntimeStatus

INFERENCE_TIMEOUT_S, CAMERAS_TIMEOUT_S, SINKS_TIMEOUT_S, LEDGER_TIMEOUT_S = 1.2, 0.4, 1.0, 0.8
"""How long each is waited for at the end, one after the other: the process ends within 5 seconds."""
DRAIN_TIMEOUT_S = 10.0
"""How long sinks may deliver what waits when the box ends by itself."""
TIDY_INTERVAL_S, MAX_TIDY_INTERVAL_S = 10.0, 60.0
"""Interval at which free memory is returned to the system. After a reload all objects are scanned once, which stops
every thread for 60 ms of processor time (220 ms with torch): up to a minute it waits until no frame waits or runs."""
LEDGER_INTERVAL_S = 10.0
LEDGER_FILE, PREVIOUS_LEDGER_FILE = "ledger.json", "ledger.json.1"
SAME_SIGNAL_S = 0.5
"""Stop signals this close count as one: `timeout` signals a process and its group."""
MAX_START_S, EXTEND_INTERVAL_S, EXTEND_USEC = 1800.0, 10.0, 60_000_000
"""How long a start may take, and the time that the service manager gets to know of at each interval."""
UPDATE_KEYS = ("offered", "state", "why", "since", "trouble")
"""What sinks get of the state of updates."""
READY, RELOADING, STOPPING, ALIVE = "READY=1", "RELOADING=1", "STOPPING=1", "WATCHDOG=1"

log = logging.getLogger("gemel.run")


class StopSignals:
    """Signals so far: `stopping` and `reopening` are set, `reasons` are the names of the stop signals."""

    def __init__(self, stopping: threading.Event) -> None:
        self.stopping, self.reopening = stopping, threading.Event()
        self.reasons: list[str] = []
        self.last_at = -math.inf
        self.is_serving = False


@contextlib.contextmanager
def catch_signals(stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> Iterator[StopSignals]:
    """Catch SIGINT and SIGTERM (stop) and SIGHUP (reopen files); does nothing outside of the main thread.

    Until the box `is_serving` a stop signal raises KeyboardInterrupt; a second one goes to the previous handler, or
    raises KeyboardInterrupt too.
    """
    signals = StopSignals(stopping)
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        now = clock()
        if now < signals.last_at + SAME_SIGNAL_S:
            return
        signals.last_at = now
        signals.reasons.append(signal.Signals(number).name)
        if len(signals.reasons) > 1:
            if not callable(before[number]):
                raise KeyboardInterrupt
            before[number](number, frame)
        stopping.set()
        if not signals.is_serving:
            raise KeyboardInterrupt

    def reopen(number: int, frame: FrameType | None) -> None:
        signals.reopening.set()

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    try:
        for number, handler in ((signal.SIGINT, stop), (signal.SIGTERM, stop), (signal.SIGHUP, reopen)):
            before[number] = signal.signal(number, handler)
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Notifier:
    """Sends states to the service manager's socket (sd_notify); does nothing without one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket
            self._address = "\0" + self._address[1:]
        self.alive_interval_s = int(environment.get("WATCHDOG_USEC", 0)) / 3e6 or None
        """Interval of `ALIVE`, a third of the manager's timeout; None without one."""

    def send(self, *states: str) -> None:
        """Send these states, lines such as `READY` or `STATUS=...`."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto("\n".join(states).encode(), self._address)


@contextlib.contextmanager
def extend_start(notifier: Notifier) -> Iterator[None]:
    """Keep the service manager from ending a start that compiles engines, for at most MAX_START_S."""
    done = threading.Event()

    def extend() -> None:
        ends = time.monotonic() + MAX_START_S
        while not done.wait(EXTEND_INTERVAL_S) and time.monotonic() < ends:
            notifier.send("STATUS=loading the bundle and its engines", f"EXTEND_TIMEOUT_USEC={EXTEND_USEC}")

    thread = threading.Thread(target=extend, name="start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class LedgerFile:
    """The ledger's file in the spool, written in a thread so that a hanging disk blocks nothing.

    `problem` says why it could not be written. The file of the previous run is kept beside it.
    """

    def __init__(self, spool: Path) -> None:
        self._path = spool / LEDGER_FILE
        self._thread: threading.Thread | None = None
        self._is_first = True
        self.problem: str | None = None

    def write(self, summary: Mapping[str, Any]) -> None:
        """Begin to write; left out while the last write goes on."""
        if self.join(0.0):
            self._thread = threading.Thread(target=self._write, args=(summary,), name="ledger", daemon=True)
            self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the last write; False where it takes too long."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _write(self, summary: Mapping[str, Any]) -> None:
        if self._is_first:
            self._is_first = False
            with contextlib.suppress(OSError):  # the first run has no previous file
                os.replace(self._path, self._path.with_name(PREVIOUS_LEDGER_FILE))
        try:
            with open_atomic(self._path, overwrite=True) as file:
                file.write(json.dumps(summary, indent=2).encode())
            self.problem = None
        except InputError as error:
            if self.problem is None:
                log.error("%s", error)
            self.problem = str(error)


def serve(box: ReadyBox, signals: StopSignals, build: BuildBox, seconds: float) -> dict[str, Any]:
    """Serve until the cameras have ended and nothing waits, a stop is requested, `seconds` are over, or a failure;
    nothing that hangs is waited for. `build` makes the box anew for a reload.

    Returns a summary of JSON values: the ledger, bytes moved and swaps while serving (those of warm-ups apart), the
    most bytes resident and used, what could not be written (`unwritten`), why it stopped, its `fault` if any, and what
    is `hanging`. The same is written to the ledger's file at intervals and at the end. Raises InputError where the
    device lacks the memory.
    """
    service = Service(box, signals, build)
    try:
        service.start(seconds)
        service.oversee()
    finally:
        summary = service.end()
    return summary


class Service:
    """All threads of a serving box, overseen from the calling thread."""

    def __init__(self, box: ReadyBox, signals: StopSignals, build: BuildBox) -> None:
        self._overhead_bytes = private_bytes()
        config, bundle = box.config, box.bundle
        self._frames = box.costed.loaded.blank_frames()
        self._signals, self._sinks = signals, SinkManager(config.sinks, self._state, self._order)
        self._ledger_file = self._spool = None
        if config.spool is not None:
            self._ledger_file = LedgerFile(config.spool.path)
            self._spool = Spool(config.spool, {query.id: query for query in bundle.queries})
        observer = None
        if config.http is not None:
            from gemel.edge_runtime.http.snapshots import Observer  # HTTP libraries take half a second to import

            observer = Observer({query.id: query.camera for query in bundle.queries})
        self._runtime = Runtime(box, self._sinks, observer, self._spool)
        self._notifier, self._is_ready, self._is_frozen = Notifier(), False, True
        self._reloads = ReloadManager(self._runtime, build, self._notify_reload, self._follow_reload)
        self._inference = InferenceThread(
            self._runtime, signals.stopping, lambda: self._sinks.is_unread, self._between_frames
        )
        self._load = LoadMonitor()
        self._updater: Updater | None = None
        if config.updates is not None and config.spool is not None:
            files = UpdateFolder(config.spool.path, config.configured_bundle or config.bundle)
            self._updater = Updater(
                config.updates, files, self._reloads.request, self._runtime.ledger.to_json, self._query_problems,
                config.factories, config.path.resolve().parent,
            )  # fmt: skip
        self._http: HttpService | None = None
        self._detector_port: DetectorPort | None = None
        self._arrived: ArrivedModels | None = None
        if observer is not None and config.http is not None:
            from gemel.edge_runtime.http.app import HttpService
            from gemel.edge_runtime.life.live_status import RuntimeStatus

            status = RuntimeStatus(
                self._inference, self._reloads, self._sinks, observer, self._spool, self._load, self._updater
            )
            self._http = HttpService(status, observer.metrics, config.http, config.path)
            if config.detector_port is not None:
                self._detector_port = self._open_detector_port(config.detector_port, status, observer)
        self._ended: float | None = None
        self._failure: str | None = None
        self._hanging: list[str] = []
        self._unwritten: list[str] = []

    def _open_detector_port(self, port: DetectorPortConfig, status: RuntimeStatus, observer: Observer) -> DetectorPort:
        from gemel.edge_runtime.arrivals.detector_port import DetectorPort

        config = self._runtime.active.box.config
        if port.accept_models:
            camera = next(camera.id for camera in config.cameras.values() if camera.is_push)
            self._arrived = ArrivedModels(config, camera, self._reloads.request)
        add_model = None if self._arrived is None else self._arrived.add
        return DetectorPort(port, status.push_queries, observer.metrics.tensors, add_model)

    def _state(self) -> BoxState:
        active = self._runtime.active
        streams = {camera.id: camera.state is CameraPhase.STREAMING for camera in active.cameras}
        cameras = {query.id: query.camera for query in active.queries.values()}
        settings = {query: self._runtime.settings(query) for query in cameras}
        update = None
        if self._updater is not None:
            told = self._updater.to_json()
            update = {"installed": active.identity.bundle[:BUNDLE_DIGITS], **{key: told[key] for key in UPDATE_KEYS}}
        return BoxState(streams, cameras, active.box.config.event_kinds, settings, update)

    def _order(self, kind: str, name: str, order: bytes, by: str) -> None:
        try:
            self._runtime.order(kind, name, order, by)
        except (KeyError, InputError) as error:
            log.warning(f"{kind} %s: an order of %s: %s", name, by, one_line(error))

    def _between_frames(self) -> None:
        self._reloads.apply_pending()
        self._runtime.check_events()

    def _query_problems(self) -> dict[str, str]:
        """Queries that cannot run, or that the last drift check of this bundle found below target."""
        active = self._runtime.active
        publisher, drift = active.executor.publisher, None if self._spool is None else self._spool.drift
        found = {query: f"cannot run: {publisher.failures[query]}" for query in publisher.disabled}
        if drift is not None and drift.bundle == active.identity.bundle[:BUNDLE_DIGITS]:
            found |= {one.id: "the drift check finds it below its target" for one in drift.queries
                      if one.verdict == BELOW}  # fmt: skip
        return found

    def start(self, seconds: float) -> None:
        """Begin to serve for `seconds`."""
        box, text = self._runtime.active.box, "gemel %s starts: box %s, config %s, bundle %s (%s)"
        log.info(text, installed_version(), box.config.name, box.config.path, box.bundle.path, box.bundle.digest[:12])
        if self._http is not None:
            self._http.start()
        if self._detector_port is not None:
            self._detector_port.start(box.config.path)
        if self._spool is not None:
            self._spool.start()
        if self._runtime.recorder is not None:
            self._runtime.recorder.start()
        self._sinks.start()
        self._reloads.start()
        if self._updater is not None:
            self._updater.start()
        self._inference.start(self._frames, seconds)

    def oversee(self) -> None:
        """Check on the box until it ends, something hangs, or a stop is requested."""
        watchdog, now = Watchdog(), time.monotonic()
        alive_at, tidied_at, written_at = 0.0, now, now
        while not self._inference.over.wait(WATCH_INTERVAL_S):
            now = time.monotonic()
            if not self._is_ready and self._inference.started is not None:
                self._is_ready = True
                name_threads()
                self._notifier.send(READY)
            if (interval_s := self._notifier.alive_interval_s) is not None and now >= alive_at + interval_s:
                alive_at = now
                self._notifier.send(ALIVE)
            if self._signals.stopping.is_set():
                return
            if self._signals.reopening.is_set():
                self._signals.reopening.clear()
                log.info("reopening files; reading config and bundle again")
                self._sinks.reopen()
                self._reloads.request()
            self._load.add(now, self._runtime.ledger.to_json)
            self._runtime.ease_decoding(self._load)
            self._failure = watchdog.check(self._inference.executor.activity, now)
            if self._failure is not None:
                log.error("%s: the box ends", self._failure)
                return
            if self._ledger_file is not None and now >= written_at + LEDGER_INTERVAL_S:
                written_at = now
                self._ledger_file.write(self.summary())
            if self._is_ready and now >= tidied_at + TIDY_INTERVAL_S:
                if not self._is_frozen and self._is_busy() and now < tidied_at + MAX_TIDY_INTERVAL_S:
                    continue
                tidied_at = now
                name_threads()
                self._return_free_memory()

    def _is_busy(self) -> bool:
        """Whether a frame waits or runs."""
        return bool(self._runtime.mailboxes.pending()) or self._inference.executor.activity is not None

    def _return_free_memory(self) -> None:
        """Collect garbage and trim the heap; the long-lived objects of a box are scanned once and then frozen."""
        if self._is_frozen:
            gc.collect()
        else:
            self._is_frozen = True
            gc.unfreeze()
            freeze_garbage_collector()
        trim_heap()

    def _notify_reload(self, begins: bool) -> None:
        if self._is_ready:
            now = f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"
            self._notifier.send(*((RELOADING, now) if begins else (READY,)))

    def _follow_reload(self, box: ReadyBox) -> None:
        self._is_frozen = False
        if self._http is not None and box.config.http is not None:
            self._http.set_access(box.config.http)

    def end(self) -> dict[str, Any]:
        """End everything without waiting long for anything, and write the ledger; returns the summary."""
        self._ended = time.monotonic()
        self._notifier.send(STOPPING)
        inference, stopping = self._inference, self._signals.stopping
        ends_by_itself = inference.over.is_set() and not stopping.is_set()
        stopping.set()
        gc.unfreeze()  # some libraries complain about objects that are not collected at exit
        self._runtime.mailboxes.wake()
        if self._updater is not None:
            self._updater.stop()
        self._reloads.stop()
        if self._arrived is not None:
            self._arrived.stop()
        try:
            for camera in inference.cameras:
                camera.stop()
            if self._failure or not inference.join(INFERENCE_TIMEOUT_S):
                self._hanging.append("the inference")
            self._failure = self._failure or inference.failure
            deadline = time.monotonic() + CAMERAS_TIMEOUT_S
            for camera in inference.cameras:
                if camera.alive and not camera.join(max(0.0, deadline - time.monotonic())):
                    self._hanging.append(f"camera {camera.id}")
            self._runtime.events.end()
            self._close(DRAIN_TIMEOUT_S if ends_by_itself else SINKS_TIMEOUT_S)
        finally:
            summary = self.summary()
            self._finish_ledger(summary)
        if summary["hanging"]:
            log.warning("not waited for: %s", ", ".join(summary["hanging"]))
        return summary

    def _close(self, sinks_timeout_s: float) -> None:
        """Close the sinks in this thread and all else beside, each in a thread of its own."""
        trace, http, spool, clips = self._runtime.trace, self._http, self._spool, self._runtime.recorder
        port = self._detector_port
        closing = {
            "the trace": None if trace is None else trace.close,
            "HTTP": None if http is None else http.stop,
            "zmq": None if port is None else port.stop,
            "the spool": None if spool is None else spool.stop,
            "the clips": None if clips is None else clips.stop,
        }
        threads = {name: threading.Thread(target=close, daemon=True) for name, close in closing.items() if close}
        for thread in threads.values():
            thread.start()
        deadline = time.monotonic() + SINKS_TIMEOUT_S
        self._hanging += self._sinks.close(sinks_timeout_s)
        for name, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._hanging.append(name)
        if not self._hanging:  # a thread that hangs may still use it
            self._runtime.arena.close()
        self._unwritten += self._sinks.complaints
        if trace is not None and trace.refused:
            self._unwritten.append(trace.refused)

    def _finish_ledger(self, summary: dict[str, Any]) -> None:
        if self._ledger_file is None or self._inference.thread is None:
            return
        deadline = time.monotonic() + LEDGER_TIMEOUT_S
        is_written = self._ledger_file.join(LEDGER_TIMEOUT_S)
        if is_written:
            self._ledger_file.write(summary)
            is_written = self._ledger_file.join(deadline - time.monotonic())
        if not is_written:
            summary["hanging"].append("the ledger")
        if self._ledger_file.problem is not None:
            summary["unwritten"].append(self._ledger_file.problem)

    def summary(self) -> dict[str, Any]:
        """What was done so far."""
        inference, arena, executor = self._inference, self._runtime.arena, self._inference.executor
        active, reloads, mailboxes = self._runtime.active, self._reloads, self._runtime.mailboxes
        ledger, started = self._runtime.ledger, inference.started
        return {
            **active.box.costed.to_json(), "run": active.identity.run, "engines": active.box.engine_names,
            "seconds": 0.0 if started is None else round((self._ended or time.monotonic()) - started, 3),
            "stopped_by": self._stopped_by(), "fault": self._failure, "hanging": list(self._hanging),
            **inference.loads,
            "bytes_overflowed": inference.overflow_bytes, "warm_up": dict(inference.warm_up),
            "compactions": arena.compactions, "compacted_bytes": arena.compacted_bytes,
            "max_resident_bytes": arena.max_resident_bytes,
            "max_used_bytes": executor.device.max_used_bytes + active.box.costed.held_bytes,
            "max_waiting_bytes": mailboxes.max_bytes, "most_waiting_bytes": mailboxes.max_waiting_bytes,
            "overhead_bytes": self._overhead_bytes, "copy_bytes_per_s": round(executor.costs.copy_bytes_per_s),
            "queries": executor.to_json(), "cameras": [camera.to_json() for camera in inference.cameras],
            "joint": asdict(executor.joint), "reloads": dict(reloads.counts), "refused": reloads.refused,
            "bundle_fault": active.bundle_problem,
            "sinks": self._sinks.to_json(), "sinks_gone": self._sinks.past_json(),
            "spool": None if self._spool is None else self._spool.to_json(),
            "unwritten": list(self._unwritten),
            "overloaded": self._load.is_overloaded,
            "balanced": ledger.balanced, "ledger": ledger.to_json(),
        }  # fmt: skip

    def _stopped_by(self) -> str | None:
        """Why it stopped; None while it runs."""
        if self._signals.reasons:
            return self._signals.reasons[0]
        if self._failure is not None:
            return str(StopReason.FAILURE)
        if self._inference.over.is_set():
            return str(self._inference.stopped_by)
        return str(StopReason.STOP_REQUESTED) if self._signals.stopping.is_set() else None
