"""Progress events, log rows and their words: one enum each for events, steps, repairs and outcomes.

A long command (merge, training, demo) takes one callable, `Progress`, and calls it with an event's name and fields.
Every command sends these three:

- `stages` (names): once, before anything else: the stages to come. A merge within a demo announces its own.
- `stage` (name): this stage begins and the one before it has ended. Stages may be skipped, never repeated.
- `part` (done 0 to 1, seconds_left or None): progress of the current stage, at most once a second. If only an upper
  bound of the stage is known, `done` is relative to it. It never falls within a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

INTERVAL_S = 1.0
"""Minimum time between two `part` events."""
MIN_DONE = 0.02
"""Part of a stage below which the remaining time is not estimated."""


class Event(str, Enum):
    """Events of a merge and a training, with their fields; events of a merge that name `flops` are log rows too."""

    WARNING = "warning"
    """text"""
    QUERY = "query"
    """query, index, count: training of an original begins"""
    CYCLE = "cycle"
    """query, cycle, cycles, val"""
    ORIGINAL = "original"
    """query, metric, val, test, seconds"""
    EPOCH = "epoch"
    """queries, epoch, epochs, loss, ratios {query: ratio on val}"""
    REFERENCE = "reference"
    """query, metric, val, needed: an original's result"""
    RECIPE = "recipe"
    """rate, epochs, features, private"""
    IDENTICAL = "identical"
    """queries (settled by it alone), sets, saved_bytes"""
    ANCESTRY = "ancestry"
    """kin, similarity {query: cosine of weights}, donor"""
    NETWORK = "network"
    """query, network (the query whose network was tried), how (an Answer), ratio, required, accepted: substitution"""
    START = "start"
    """ratios (tied, before training), network (the query whose network answers all, or None), hard, saved_bytes,
    private_layers {query: [paths]}"""
    ROUND = "training"
    """training (`donor-frozen` or `joint`), epoch, ratios, met [queries], saved_bytes of the queries at target"""
    REPAIR = "repair"
    """query, repair (a Repair), ratio, required, epochs"""
    ACCEPTED = "accepted"
    """p_values {query: on the part of val that accepts}, accepted, unproven and refused [queries]"""
    RESTORE = "restore"
    """accepted_bytes, instead_of_bytes: an earlier state saves more than the last one"""
    ATTEMPT = "attempt"
    """`gemel`: round, group, members, kept, ratios, epochs, diverged; `mainstream`: query, prefix, ratio, held"""
    SEARCH_ROUND = "round"
    """round, rounds, signature, members, saved_bytes, ceiling_bytes, ratios, seconds"""
    PREFIX = "prefix"
    """query, prefix, layers, donor, ratio, tried [[length, ratio]]"""
    CAMERA_PREFIX = "camera-prefix"
    """query, donor, common (layers), of, ratio, required, tried [[length, ratio]], saved_flops_per_s"""
    WEIGHTS = "widths"
    """weights, stored_bytes, ratios, in_the_way"""
    PROCESSES = "processes"
    """queries of each process"""
    TEST = "test"
    """query, metric, original, merged, ratio, met, certain, worth, reason (why there is no evidence)"""


class TrainingKind(str, Enum):
    """The trainings of the method top-down."""

    DONOR_FROZEN = "donor-frozen"
    JOINT = "joint"


class Repair(str, Enum):
    """What a repair of one query did."""

    NORMS_AND_HEAD = "norms and head"
    ORIGINAL = "original"


class Answer(str, Enum):
    """How another query's network answers a query."""

    UNCHANGED = "unchanged"
    NORMS_AND_HEAD = "norms and head"


class Progress(Protocol):
    """Called with an event's name (an `Event`, or one of `stages`, `stage`, `part`) and plain values."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Take note of one event."""
        ...


def silent(event: str, **fields: Any) -> None:
    """Ignore all events."""


class Stages:
    """Reports stages: `announce` them, `begin` each, and `add` to its amount, or `reach` an amount."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._whole: float | None = None
        self._reached, self._most, self._began, self._reported = 0.0, 0.0, 0.0, 0.0

    def announce(self, names: Sequence[str]) -> None:
        """Report the stages to come, in order."""
        self._progress("stages", names=list(names))

    def begin(self, name: str, whole: float | None = None) -> None:
        """Begin a stage; `whole` is its largest amount in any unit, None if unknown."""
        self._whole, self._reached, self._most = whole, 0.0, 0.0
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
        left = (now - self._began) * (1 - done) / done if done >= MIN_DONE else None
        self._reported = now
        self._progress("part", done=done, seconds_left=left)
