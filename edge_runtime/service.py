"""What a box is asked by signals: SIGINT and SIGTERM to stop (a second one does not wait for it), SIGHUP to open its
files anew.

Tells the service manager how a box is (sd_notify): ready, alive, reloading, stopping; does nothing without one.

The ledger's file: what a box has done so far, written again and again while it runs, and at its end; that of the
run before is kept beside it.

The last stage of a box: cameras, mailboxes, memory and engines at work until it is over.
"""

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
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from edge_runtime.box import ReadyBox
from edge_runtime.executor import WATCH_INTERVAL_S, Watchdog
from edge_runtime.inference import STOP_REQUESTED, InferenceThread, overflowed
from edge_runtime.reload import BuildBox, ReloadManager
from edge_runtime.runtime import Runtime
from edge_runtime.samples import Spool
from edge_runtime.sinks.worker import SinkManager
from models.bundle import Bundle
from models.errors import InputError
from models.io import open_atomic
from models.process import freeze_garbage_collector, trim_heap

if TYPE_CHECKING:
    from edge_runtime.http.app import HttpService
    from edge_runtime.observer import Observer


TOGETHER_S = 0.5
"""Signals to stop that come so close are one: `timeout` sends its own to a process and to the group of that."""


class StopSignals:
    """What came so far. `stopping` and `reopening` are set, `reasons` are the names of the signals to stop,
    `last_at` is when the last of them came.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self.stopping, self.reopening = stopping, threading.Event()
        self.reasons: list[str] = []
        self.last_at = -math.inf
        self.is_serving = False


@contextlib.contextmanager
def catch_signals(stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> Iterator[StopSignals]:
    """Listen; only possible in the main thread.

    Until it `is_serving` a signal to stop is a KeyboardInterrupt; the second one is for whoever listened before, or
    else KeyboardInterrupt too.
    """
    asked = StopSignals(stopping)

    def note(number: int, frame: FrameType | None) -> None:
        now = clock()
        if now < asked.last_at + TOGETHER_S:
            return
        asked.last_at = now
        asked.reasons.append(signal.Signals(number).name)
        if len(asked.reasons) > 1:
            _hand_on(before[number], number, frame)
        stopping.set()
        if not asked.is_serving:
            raise KeyboardInterrupt

    def anew(number: int, frame: FrameType | None) -> None:
        asked.reopening.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number, handler in ((signal.SIGINT, note), (signal.SIGTERM, note), (signal.SIGHUP, anew)):
            before[number] = signal.signal(number, handler)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hand_on(handler: Any, number: int, frame: FrameType | None) -> None:
    if not callable(handler):
        raise KeyboardInterrupt
    handler(number, frame)


READY, RELOADING, STOPPING, ALIVE = "READY=1", "RELOADING=1", "STOPPING=1", "WATCHDOG=1"


class Notifier:
    """Sends states to the socket that systemd names in the environment; a manager that is gone is passed over."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # a name without a file
            self._address = "\0" + self._address[1:]
        self.is_gone = False
        """Whether who started this process, at an address that ends with it (`gemel run --supervise`), has ended."""
        every = environment.get("WATCHDOG_USEC", "")
        self.alive_every_s = int(every) / 3e6 if every.isascii() and every.isdigit() and int(every) > 0 else None
        """How often `ALIVE` is to be sent, a third of what the manager waits for; None where it does not wait."""

    def tell(self, *states: str) -> None:
        """Send these states, lines such as `READY` or `STATUS=...`."""
        if not self._address:
            return
        with contextlib.suppress(OSError), self._noticing(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto("\n".join(states).encode(), self._address)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRefusedError:
            self.is_gone = self._address.startswith("\0")
            raise


LEDGER_FILE, BEFORE_FILE = "ledger.json", "ledger.json.1"
LEDGER_INTERVAL_S = 10.0

log = logging.getLogger("gemel.run")


class LedgerFile:
    """Written in a thread of its own: a disk that hangs stops nobody. `refused` says why it could not be, if so."""

    def __init__(self, spool: Path | None, every_s: float = LEDGER_INTERVAL_S) -> None:
        self._path = None if spool is None else spool / LEDGER_FILE
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self.refused: str | None = None
        self._changed = threading.Condition()
        self._given: Mapping[str, Any] | None = None
        self._last = False
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def start(self) -> None:
        """Begin; nothing is written before."""
        if self._path is not None:
            self._thread.start()

    def is_due(self) -> bool:
        """Whether it is time to write again."""
        if self._path is None or time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + self._every_s
        return True

    def write(self, summary: Mapping[str, Any], last: bool = False) -> None:
        """Have this written next; what still waits to be is not."""
        with self._changed:
            self._given, self._last = summary, last
            self._changed.notify()

    def finish(self, summary: Mapping[str, Any], timeout_s: float) -> bool:
        """Write this and no more; False where that takes too long. Nothing is written where it was not begun."""
        if self._thread.ident is None:
            return True
        self.write(summary, last=True)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        assert self._path is not None
        with contextlib.suppress(OSError):  # the first run has none before it
            os.replace(self._path, self._path.with_name(BEFORE_FILE))
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._given is not None)
                summary, self._given, last = self._given, None, self._last
            try:
                with open_atomic(self._path, overwrite=True) as file:
                    file.write(json.dumps(summary, indent=2).encode())
                self.refused = None
            except InputError as error:
                if self.refused is None:
                    log.error("%s", error)
                self.refused = str(error)


INFERENCE_TIMEOUT_S, CAMERAS_TIMEOUT_S, SINKS_TIMEOUT_S, LEDGER_TIMEOUT_S = 1.2, 0.4, 1.0, 0.8
"""How long each of these is waited for at the end, one after the other: within 5 seconds the process is gone."""
TIDY_INTERVAL_S = 10.0
"""How often memory that is free again goes back to the system."""
DRAIN_TIMEOUT_S = 10.0
"""How long the post may take to deliver what waits where nobody asked the box to stop."""

log = logging.getLogger("gemel.run")


def serve(box: ReadyBox, asked: StopSignals, refit: BuildBox, seconds: float) -> dict[str, Any]:
    """Serve until the cameras have ended and nothing waits, the box is asked to stop, so many seconds are over, or
    something is at fault; nothing that hangs is waited for. `refit` makes the box anew when a reload is asked for.

    Returns what was done, as JSON values: the ledger, bytes moved and swaps while serving (those of warm-ups apart),
    the most bytes resident and used, what could not be written (`unwritten`, a line each), why it stopped, the `fault`
    if that was one, and what is `hanging`. The same is written to the ledger's file now and then, and at the end
    whatever comes between. Raises InputError where the device lacks the memory.
    """
    serving = Service(box, asked, refit)
    try:
        serving.start(seconds)
        serving.oversee()
    finally:
        summary = serving.end()
    return summary


class Service:
    """All that is at work in a box, overseen from the thread that called for it."""

    def __init__(self, box: ReadyBox, asked: StopSignals, refit: BuildBox) -> None:
        opened, self._overhead = box.fitted.box, _private_bytes()
        config, self._frames = opened.config, opened.frames
        self._asked, self._post = asked, SinkManager(config.sinks)
        self._ledger_file = LedgerFile(None if config.spool is None else config.spool.path)
        observer = None if config.http is None else _observer(opened.bundle)
        self._spool = None
        if config.spool is not None:
            self._spool = Spool(config.spool, {query.id: query for query in opened.bundle.queries})
        self._workplace = Runtime(box, self._post, observer, self._spool)
        self._arena, self._trace = self._workplace.arena, self._workplace.trace
        self._notifier, self._is_ready, self._alive_at = Notifier(), False, 0.0
        self._is_settled = threading.Event()
        self._reloads = ReloadManager(self._workplace, refit, self._reloading, self._admit)
        self._inference = InferenceThread(
            self._workplace, asked.stopping, lambda: self._post.is_unheard, self._reloads.take_up
        )
        self._http: HttpService | None = None
        if observer is not None and config.http is not None:
            from edge_runtime.http.app import HttpService
            from edge_runtime.observer import RuntimeStatus

            watched = RuntimeStatus(self._inference, self._reloads, self._post, observer, self._spool)
            self._http = HttpService(watched, observer.measures, config.http, config.path)
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
        self._reloads.start()
        self._inference.start(self._frames, seconds)

    def reload(self) -> Future[str | None]:
        """Take up config and bundle as they are now; the reason where they are not applied."""
        return self._reloads.ask()

    def oversee(self) -> None:
        """Look after what is at work until it is over, something hangs, or the box is asked to stop."""
        watchdog, inference, tidied_at = Watchdog(), self._inference, time.monotonic()
        while not inference.over.wait(WATCH_INTERVAL_S):
            self._tell_manager()
            if self._asked.stopping.is_set():
                return
            if self._asked.reopening.is_set():
                self._asked.reopening.clear()
                log.info("files are opened anew; config and bundle are read again")
                self._post.reopen()
                self.reload()
            self._fault = watchdog.looks(inference.executor.doing, time.monotonic()) or self._orphaned()
            if self._fault is not None:
                log.error("%s: the box ends", self._fault)
                return
            if self._ledger_file.is_due():
                self._ledger_file.write(self.summary())
            if time.monotonic() >= tidied_at + TIDY_INTERVAL_S:
                self._tidy()
                tidied_at = time.monotonic()

    def _tidy(self) -> None:
        """Give back what is free, garbage in circles too; what a box consists of is looked through once."""
        if self._is_settled.is_set():
            gc.collect()
        else:
            self._is_settled.set()
            freeze_garbage_collector()
        trim_heap()

    def _reloading(self, begins: bool) -> None:
        """Tell the service manager of a reload."""
        if self._is_ready:
            now = f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"
            self._notifier.tell(*((RELOADING, now) if begins else (READY,)))

    def _admit(self, box: ReadyBox) -> None:
        """Another box serves: its config may have another token, and what the one before consisted of is garbage."""
        self._is_settled.clear()
        access = box.fitted.box.config.http
        if self._http is not None and access is not None:
            self._http.admit(access)

    def _tell_manager(self) -> None:
        """That it serves, once it does, and that it is alive, as often as the service manager wants to hear it."""
        now, every_s = time.monotonic(), self._notifier.alive_every_s
        if not self._is_ready and self._inference.began is not None:
            self._is_ready = True
            self._notifier.tell(READY)
        if every_s is not None and now >= self._alive_at:
            self._alive_at = now + every_s
            self._notifier.tell(ALIVE)

    def _orphaned(self) -> str | None:
        return "what started the box is gone" if self._notifier.is_gone else None

    def end(self) -> dict[str, Any]:
        """Let everything end, without waiting long for anything, and write the ledger; returns the summary."""
        self._ended = time.monotonic()
        self._notifier.tell(STOPPING)
        inference, asked = self._inference, self._asked
        by_itself = inference.over.is_set() and not asked.stopping.is_set()
        asked.stopping.set()
        gc.unfreeze()  # what libraries leave is to be found as the process ends, or some complain
        self._workplace.mailboxes.nudge()
        self._reloads.stop()
        try:
            for camera in inference.cameras:
                camera.stop()
            if self._fault or not inference.join(INFERENCE_TIMEOUT_S):
                self._hanging.append("the inference")
            self._fault = self._fault or inference.fault
            ends = time.monotonic() + CAMERAS_TIMEOUT_S
            dead = [one for one in inference.cameras if one.alive and not one.join(max(0.0, ends - time.monotonic()))]
            self._hanging += [f"camera {camera.id}" for camera in dead]
            self._close(by_itself)
        finally:
            summary = self.summary()
            written = self._ledger_file.finish(summary, LEDGER_TIMEOUT_S)
        if self._ledger_file.refused is not None:
            summary["unwritten"].append(self._ledger_file.refused)
        if not written:
            summary["hanging"].append("the ledger")
        if summary["hanging"]:
            log.warning("not waited for: %s", ", ".join(summary["hanging"]))
        return summary

    def _close(self, by_itself: bool) -> None:
        closing: list[tuple[str, Callable[[], object]]] = []
        if self._trace is not None:
            closing.append(("the trace", self._trace.close))
        if self._http is not None:
            closing.append(("HTTP", self._http.stop))
        if self._spool is not None:
            closing.append(("the spool", self._spool.stop))
        threads = [(name, threading.Thread(target=close, daemon=True)) for name, close in closing]
        for _, thread in threads:
            thread.start()
        ends = time.monotonic() + SINKS_TIMEOUT_S
        self._hanging += self._post.close(DRAIN_TIMEOUT_S if by_itself else SINKS_TIMEOUT_S)
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
        box, warmed, ledger = self._workplace.now.box, inference.warmed, executor.publisher.ledger
        began, outcomes = inference.began, self._reloads.state
        return {
            **box.fitted.to_json(), "run": self._workplace.now.identity.run, "engines": box.names(),
            "seconds": 0.0 if began is None else round((self._ended or time.monotonic()) - began, 3),
            "stopped_by": self._stopped_by(), "fault": self._fault, "hanging": list(self._hanging),
            "bytes_moved": arena.bytes_moved - warmed["bytes_moved"],
            "swaps": arena.swaps - warmed["swaps"],
            "bytes_overflowed": overflowed(box) - inference.overflowed,
            "warm_up": dict(warmed),
            "compactions": arena.compactions, "compacted_bytes": arena.compacted_bytes,
            "max_resident_bytes": arena.max_resident_bytes, "max_used_bytes": executor.device.max_used_bytes,
            "max_waiting_bytes": executor.parts.mailboxes.max_bytes, "most_waiting_bytes":
                executor.parts.mailboxes.most_bytes,
            "overhead_bytes": self._overhead, "copy_bytes_per_s": round(executor.costs.copy_bytes_per_s),
            "queries": executor.to_json(), "cameras": [camera.to_json() for camera in inference.cameras],
            "reloads": {"applied": outcomes.applied, "refused": outcomes.refused}, "refused": outcomes.reason,
            "bundle_fault": self._workplace.now.bundle_problem,
            "sinks": self._post.to_json(), "sinks_gone": self._post.past_json(),
            "spool": None if self._spool is None else self._spool.to_json(),
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
        return STOP_REQUESTED if self._asked.stopping.is_set() else None


def _observer(bundle: Bundle) -> Observer:
    """Imported where a box is watched: the libraries of HTTP take half a second."""
    from edge_runtime.observer import Observer

    return Observer(bundle)


def _private_bytes() -> int | None:
    """Memory of this process that is not a mapped file, as far as the system tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
