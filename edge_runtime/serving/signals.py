"""SIGINT and SIGTERM ask a box to stop; a second one does not wait for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signals(stopping: threading.Event) -> Iterator[list[str]]:
    """Let SIGINT and SIGTERM set `stopping`, and note which came; only possible in the main thread.

    The next one is for whoever listened before, or else KeyboardInterrupt.
    """
    reasons: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        reasons.append(signal.Signals(number).name)
        if len(reasons) > 1:
            _hand_on(before[number], number, frame)
        stopping.set()

    if threading.current_thread() is not threading.main_thread():
        yield reasons
        return
    before: dict[int, Callable[..., Any] | int | None] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
        yield reasons
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hand_on(handler: Any, number: int, frame: FrameType | None) -> None:
    if not callable(handler):
        raise KeyboardInterrupt
    handler(number, frame)
