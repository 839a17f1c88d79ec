"""How long work tells what it is doing: one callable, given an event and its fields; and the stages of such work.

Three events are the same whatever the work is (a merge, training, a demo), and are all that a reader need know:
- `stages` (names: list[str]): once, before anything else: what will be done, in order, in plain words. Work that is
  part of other work (a merge in a demo) announces its own.
- `stage` (name: str): one of those begins, and the one before it has ended. Stages may be left out, never repeated.
- `part` (done: float from 0 to 1, seconds_left: float or None): how much of the stage at work is done, at most once a
  second, and how long the rest of this stage will take if it goes on like this (None: not known yet). Where it is
  known only how much there is to do at most, `done` is of that, and the stage may end before it comes to 1. It never
  falls within a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

INTERVAL_S = 1.0
"""Between two `part` events pass so many seconds at least."""
MIN_DONE = 0.02
"""Before this part is done there is no saying how long the rest takes."""


class Progress(Protocol):
    """Called with an event's name and plain values; beside `stages`, `stage` and `part`, these.

    Of training originals: `query` (query, index, count), `cycle` (query, cycle, cycles, val), `original` (query,
    metric, val, test, seconds). Of any training: `epoch` (queries, epoch, epochs, loss, ratios), `precision` (query,
    model, chosen, fp32, bf16: seconds), `rate` (rate, epochs, ratio: None where it diverged, features, private; or
    regained), `recipe` (rate, epochs, features, private, search_work).
    Of a merge: `reference` (query, metric, val, needed), `ancestry` (common, kinship), `aligned` (query, spaces, moved,
    channels), `start` (start, error, errors), `waits` (waits: a query; after, required, lost or ratio), `accepted`
    (saved_bytes, ratios: before those who waited join), `alone` (query, ratio, required), `repair` (query, repair,
    ratio, required), `round` (round, rounds, signature, members, saved_bytes, ceiling_bytes, ratios, seconds),
    `attempt` (round, members, kept, ratios; or query, prefix, ratio, held), `prefix` (query, prefix, layers, ratio),
    `crew` (queries and loads of each process, crossing_bytes), `sums` (steps, given_bytes of each process),
    `widths` (weights, stored_bytes, ratios, in_the_way), `workers` (workers, threads, on),
    `test` (query, metric, original, merged, ratio, met, certain, worth), `warning` (text).
    """

    def __call__(self, event: str, **fields: Any) -> None:
        """Take note of one event."""
        ...


def silent(event: str, **fields: Any) -> None:
    """The progress of somebody who does not want to know."""


class Stages:
    """Tells the stages of some work: `announce` them, `begin` each, and `add` what is done of it, or `reach` it."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._whole: float | None = None
        self._reached, self._most, self._began, self._told = 0.0, 0.0, 0.0, 0.0

    def announce(self, names: Sequence[str]) -> None:
        """What will be done, in order."""
        self._progress("stages", names=list(names))

    def begin(self, name: str, whole: float | None = None) -> None:
        """The next stage; `whole` is all there is to do in it at most, in any unit, None where nobody can say."""
        self._whole, self._reached, self._most = whole, 0.0, 0.0
        self._began = self._told = self._clock()
        self._progress("stage", name=name)

    def add(self, amount: float = 1.0) -> None:
        """So much more of the whole is done."""
        self.reach(self._reached + amount)

    def reach(self, amount: float) -> None:
        """So much of the whole is done by now."""
        self._reached, now = amount, self._clock()
        if not self._whole or now - self._told < INTERVAL_S:
            return
        done = self._most = max(self._most, min(1.0, amount / self._whole))
        left = (now - self._began) * (1 - done) / done if done >= MIN_DONE else None
        self._told = now
        self._progress("part", done=done, seconds_left=left)
