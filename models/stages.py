"""The progress of a long command, by stages.

A long command (merge, training, demo) takes one callable, `Progress`, and calls it with an event's name and fields.
Every command sends these three:

- `stages` (names): once, before anything else: the stages to come. A merge within a demo announces its own.
- `stage` (name): this stage begins and the one before it has ended. Stages may be skipped, never repeated.
- `part` (done 0 to 1, seconds_left or None): progress of the current stage, at most once a second. `done` never falls
  within a stage. Where only an upper bound of the stage is known it is None, and `seconds_left` is the most left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

INTERVAL_S = 1.0
"""Minimum time between two `part` events."""
MIN_DONE = 0.02
"""Part of a stage below which the remaining time is not estimated."""


class Progress(Protocol):
    """Called with an event's name (one of `stages`, `stage`, `part`, or of `merger.events.Event`) and plain values."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Take note of one event."""
        ...


def silent(event: str, **fields: Any) -> None:
    """Ignore all events."""


class Stages:
    """Reports stages: `announce` them, `begin` each, and `add` to its amount, or `reach` an amount."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._whole: float | None = None
        self._is_bound = False
        self._reached = 0.0
        self._most = 0.0
        self._began = 0.0
        self._reported = 0.0

    def announce(self, names: Sequence[str]) -> None:
        """Report the stages to come, in order."""
        self._progress("stages", names=list(names))

    def begin(self, name: str, whole: float | None = None, is_bound: bool = False) -> None:
        """Begin a stage of this amount in any unit, None if unknown; `is_bound` if it may end with less."""
        self._whole = whole
        self._is_bound = is_bound
        self._reached = 0.0
        self._most = 0.0
        self._began = self._reported = self._clock()
        self._progress("stage", name=name)

    def add(self, amount: float = 1.0) -> None:
        """Add to the amount done."""
        self.reach(self._reached + amount)

    def reach(self, amount: float) -> None:
        """Set the amount done."""
        self._reached, now = amount, self._clock()
        if not self._whole or now - self._reported < INTERVAL_S:
            return
        done = self._most = max(self._most, min(1.0, amount / self._whole))
        seconds_left = (now - self._began) * (1 - done) / done if done >= MIN_DONE else None
        self._reported = now
        self._progress("part", done=None if self._is_bound else done, seconds_left=seconds_left)
