"""How the process of a command ends: exit codes, signals, and a log that never blocks it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

from models.errors import one_line

EXIT_TIMEOUT_S = 0.5
"""A process whose result is printed ends after this time, whatever threads still hang."""
MAX_QUEUED_LINES = 1000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ExitCode(IntEnum):
    """Exit codes of all commands: `SHORT` ran, but the result falls short (target missed, verify refused)."""

    DONE = 0
    SHORT = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


class SignalHandlers:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, and records that one came (`interrupted`).

    Signals that are ignored when the process starts stay ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals from now on; has no effect outside the main thread."""
        _install(self._previous, lambda _: self._raise)

    def exit_soon(self, code: int) -> None:
        """End the process within EXIT_TIMEOUT_S."""
        timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()

    def exit(self, code: int) -> NoReturn:
        """End the process without waiting for its threads; another signal ends it at once."""
        self._set_all(lambda *_: os._exit(code))
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be closed
            sys.stdout.flush()
        os._exit(code)

    def ignore(self) -> None:
        """Ignore further signals while the first one is handled."""
        self._set_all(signal.SIG_IGN)

    def restore(self) -> None:
        """Put the handlers back that were there before `install`."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _set_all(self, handler: Any) -> None:
        for number in self._previous:
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        raise KeyboardInterrupt


class StartupSignals:
    """Until `restore`, a signal to stop ends the process at once with exit code 0, and SIGHUP has no effect.

    No exception is raised: libraries that are being imported would turn it into an error of their own.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def install(self, last_output: Callable[[str], tuple[str, str]]) -> None:
        """Handle the signals; `last_output` gives what to write to stdout and stderr for a signal's name."""

        def leave(number: int, _: FrameType | None) -> None:
            for descriptor, text in enumerate(last_output(signal.Signals(number).name), 1):
                with contextlib.suppress(OSError):  # not through Python's buffers, which may be locked
                    os.write(descriptor, text.encode())
            os._exit(ExitCode.DONE)

        _install(self._previous, lambda number: leave if number != signal.SIGHUP else lambda *_: None)

    def restore(self) -> None:
        """Put the handlers back that were there before `install`."""
        while self._previous:
            signal.signal(*self._previous.popitem())


def _install(previous: dict[int, Any], handler_for: Callable[[signal.Signals], Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_IGN, None):
            previous[number] = handler
            signal.signal(number, handler_for(number))


class OneLineFormatter(logging.Formatter):
    """Escapes line breaks in a record's message; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


class LogHandler(logging.Handler):
    """Writes records to stderr from its own thread, so that a full pipe blocks the log alone.

    Records are dropped while MAX_QUEUED_LINES are queued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(OneLineFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self._out = sys.stderr
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(MAX_QUEUED_LINES)
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def drain(self, timeout_s: float) -> None:
        """Wait until all queued records are written, at most `timeout_s`."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(timeout_s)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or has no reader
                    self._out.write(line + "\n")
                    self._out.flush()
