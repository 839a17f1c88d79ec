"""Ctrl-C, SIGTERM and a terminal that closes end a command once, cleanly; a second one does not wait for what hangs."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from gemel.commands.outcome import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Makes these signals KeyboardInterrupt in the main thread, and remembers that one came: libraries make something
    else of it. Those that whoever started the process had ignored stay so, as under nohup.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def begin(self) -> None:
        """Listen; only possible in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._interrupt)

    def told(self) -> None:
        """The first has been dealt with and told: whatever hangs now, a further one ends the process."""
        self._all(lambda *_: os._exit(INTERRUPTED))

    def hold(self) -> None:
        """Let none come between while the first is dealt with."""
        self._all(signal.SIG_IGN)

    def end(self) -> None:
        """Leave everything as it was before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _all(self, handler: Any) -> None:
        for number in self._before:
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt
