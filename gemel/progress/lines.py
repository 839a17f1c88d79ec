"""Progress where nobody watches: a sentence for each event, and one more where nothing came for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from gemel.progress.sentences import sentence
from gemel.progress.standing import Standing

QUIET_S = 2.0
"""Of events that come often, one in so many seconds is told."""
SILENT_S = 8.0
"""After so long without a word it is said what is still going on; with the second between two looks, under 10."""
FREQUENT = ("epoch",)


class Lines:
    """One line per event; `beat` says what is going on where nothing was said for long. Safe from any thread."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock, self._lock = out, clock, threading.Lock()
        self._started = self._said = clock()
        self._last = dict.fromkeys(FREQUENT, self._started - QUIET_S)
        self._standing = Standing(self._started)

    def __call__(self, event: str, **fields: Any) -> None:
        with self._lock:
            now = self._clock()
            self._standing.hear(event, fields, now)
            if event == "part":
                self._beat(now)
                return
            if event in FREQUENT:
                if now - self._last[event] < QUIET_S:
                    return
                self._last[event] = now
            if event == "stages":
                self._say(self._standing.announced(), now)
            elif event == "stage":
                self._say(self._standing.stage(), now)
            else:
                self._say(sentence(event, fields), now)

    def beat(self) -> None:
        """Say what is going on, if nothing was said for long."""
        with self._lock:
            self._beat(self._clock())

    def _beat(self, now: float) -> None:
        if now - self._said >= SILENT_S:
            self._say(self._standing.still(now), now)

    def _say(self, text: str, now: float) -> None:
        self._said = now
        print(f"[{now - self._started:6.1f} s] {text}", file=self._out, flush=True)
