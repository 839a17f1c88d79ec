"""How the process of a command ends: exit codes, signals, and a log that never blocks it."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, NoReturn

from gemel.models.errors import one_line

EXIT_TIMEOUT_S = 0.5
"""A process whose result is printed ends after this time, whatever threads still hang."""
MAX_QUEUED_LINES = 1000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


class ExitCode(IntEnum):
    """Exit codes of all commands: `SHORT` ran, but the result falls short (target missed, verify refused)."""

    DONE = 0
    SHORT = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


class SignalHandlers:
    """Handlers of SIGINT, SIGTERM and SIGHUP, which `restore` removes.

    Signals that are ignored when the process starts stay ignored, as under nohup; outside the main thread nothing is
    handled. `interrupted`: a signal raised KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: dict[int, Any] = {}

    def install(self, handler_of: Callable[[signal.Signals], Handler] | None = None) -> None:
        """Handle each signal by `handler_of` it; without one, raise KeyboardInterrupt."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    handler = self._raise if handler_of is None else handler_of(number)
                    self._previous[number] = signal.signal(number, handler)

    def exit(self, code: int) -> NoReturn:
        """End the process without waiting for its threads; another signal ends it at once."""
        self._handle(lambda *_: os._exit(code))
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be closed
            sys.stdout.flush()
        os._exit(code)

    def ignore(self) -> None:
        """Ignore further signals while the first one is handled."""
        self._handle(signal.SIG_IGN)

    def restore(self) -> None:
        """Put the handlers back that were there before `install`."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, handler: Handler) -> None:
        for number in self._previous:
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        raise KeyboardInterrupt


def exit_soon(code: int) -> None:
    """End the process within EXIT_TIMEOUT_S."""
    timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def exit_at_once(last_output: Callable[[str], tuple[str, str]]) -> Callable[[signal.Signals], Handler]:
    """Handlers that end the process with exit code 0, for a box that does not serve yet; SIGHUP has no effect.

    `last_output` gives what to write to stdout and stderr for a signal's name. No exception is raised: libraries that
    are being imported would turn it into an error of their own.
    """

    def leave(number: int, _: FrameType | None) -> None:
        for descriptor, text in enumerate(last_output(signal.Signals(number).name), 1):
            with contextlib.suppress(OSError):  # not through Python's buffers, which may be locked
                os.write(descriptor, text.encode())
        os._exit(ExitCode.DONE)

    return lambda number: leave if number != signal.SIGHUP else lambda *_: None


SUMMARY = "summary"
_PLACEHOLDER = re.compile(r"%%|%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_SUBJECT = re.compile(r"\b(camera|query|sink) %s")


class OneLineFormatter(logging.Formatter):
    """Escapes line breaks in a record's message; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601 with its zone), `level`, `message`; `traceback` where there is one.

    `camera`, `query` and `sink` are those of the message, `summary` is that of a box that has stopped.
    """

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {"time": format_time(record.created), "level": record.levelname.lower()}
        row |= {"message": record.getMessage(), **find_subjects(record)}
        if SUMMARY in record.__dict__:
            row[SUMMARY] = record.__dict__[SUMMARY]
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)


def find_subjects(record: logging.LogRecord) -> dict[str, str]:
    """The names that the template of a message says are of a camera, query or sink."""
    template, values = str(record.msg), record.args
    if not isinstance(values, tuple):
        return {}
    places = [place.end() for place in _PLACEHOLDER.finditer(template) if place[0] != "%%"]
    return {
        subject[1]: str(values[places.index(subject.end())])
        for subject in _SUBJECT.finditer(template)
        if subject.end() in places and places.index(subject.end()) < len(values)
    }


class TextFormatter(OneLineFormatter):
    """Date, time and zone, level, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return format_time(record.created)


def format_time(unix_s: float) -> str:
    """ISO 8601 in local time, with milliseconds and the zone."""
    return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="milliseconds")


def configure_log(handler: logging.Handler, level: int) -> None:
    """Log the lines of Gemel from `level` on; of libraries only what is wrong."""
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])
    logging.getLogger("gemel").setLevel(level)


class LogHandler(logging.Handler):
    """Writes records to stderr from its own thread, so that a full pipe blocks the log alone.

    Records are dropped while MAX_QUEUED_LINES are queued.
    """

    def __init__(self, as_json: bool = False) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter() if as_json else TextFormatter())
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(MAX_QUEUED_LINES)
        threading.Thread(target=self._write_lines, args=(sys.stderr,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def drain(self, timeout_s: float) -> None:
        """Wait until all queued records are written, at most `timeout_s`."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(timeout_s)

    def _write_lines(self, out: Any) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or has no reader
                    print(line, file=out, flush=True)
