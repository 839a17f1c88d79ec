"""SIGINT and SIGTERM ask a box to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def signals(stopping: threading.Event) -> Iterator[list[str]]:
    """Let SIGINT and SIGTERM set `stopping`, and note which came; only possible in the main thread."""
    reasons: list[str] = []

    def note(number: int, _: object) -> None:
        reasons.append(signal.Signals(number).name)
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
