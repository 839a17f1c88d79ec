"""Where a box's processor time goes: seconds of the threads that do each part of its work."""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import Any


class Part(str, Enum):
    """A part of the work on a frame."""

    __str__ = str.__str__

    DECODE = "decode"
    CONVERT = "convert"
    PREPROCESS = "preprocess"
    RUN = "run"
    OUTPUTS = "outputs"
    EVENTS = "events"
    SPOOL = "spool"
    SINKS = "sinks"


class PartTimes:
    """Seconds by part since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(Part, 0.0)
        self._lock = threading.Lock()

    def count(self, part: Part) -> PartTimer:
        """Count what the calling thread does within `with`; other parts within it count twice."""
        return PartTimer(self, part)

    def add(self, part: Part, seconds: float) -> None:
        """Count so many seconds more."""
        with self._lock:
            self._seconds[part] += seconds

    def to_json(self) -> dict[str, float]:
        """Seconds by part."""
        with self._lock:
            return {str(part): round(seconds, 3) for part, seconds in self._seconds.items()}


class PartTimer:
    """One stretch of a part in one thread."""

    __slots__ = ("_begun", "_part", "_times")

    def __init__(self, times: PartTimes, part: Part) -> None:
        self._times, self._part = times, part

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: Any) -> None:
        self._times.add(self._part, time.thread_time() - self._begun)


PART_TIMES = PartTimes()
"""Of this process, which is one box."""
