"""What a box is asked by signals: SIGINT and SIGTERM to stop (a second one does not wait for it), SIGHUP to open its
files anew.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

TOGETHER_S = 0.5
"""Signals to stop that come so close are one: `timeout` sends its own to a process and to the group of that."""


class Asked:
    """What came so far. `stopping` and `reopening` are set, `reasons` are the names of the signals to stop,
    `last_at` is when the last of them came.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self.stopping, self.reopening = stopping, threading.Event()
        self.reasons: list[str] = []
        self.last_at = -math.inf
        self.is_serving = False


@contextlib.contextmanager
def signals(stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> Iterator[Asked]:
    """Listen; only possible in the main thread.

    Until it `is_serving` a signal to stop is a KeyboardInterrupt; the second one is for whoever listened before, or
    else KeyboardInterrupt too.
    """
    asked = Asked(stopping)

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
