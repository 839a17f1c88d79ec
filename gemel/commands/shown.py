"""The log of a command that must not stop: shown on stderr by a thread of its own, so that a pipe that nobody reads
holds up nothing but the log.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading

from models.errors import one_line

MAX_WAITING = 1000


class OneLine(logging.Formatter):
    """Each record in a line, whatever stands in it; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


class Shown(logging.Handler):
    """Lines that nobody reads are left out once many wait."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
        self._out = sys.stderr
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._work, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(self.format(record))

    def settle(self, timeout_s: float) -> None:
        """Wait until all is shown, or for so long."""
        shown = threading.Event()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(shown)
            shown.wait(timeout_s)

    def _work(self) -> None:
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or the reader has gone
                    self._out.write(line + "\n")
                    self._out.flush()
