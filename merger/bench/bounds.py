"""When a merge has had its time or its work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from merger.bench.method import MergeOptions
from merger.bench.workbench import Workbench
from merger.checkpoint import Checkpoint
from merger.training.recipe import Flops


def _now() -> float:
    return time.monotonic()


@dataclass(frozen=True)
class Bounds:
    """Nothing more is begun once `work` reaches `most_work`, or the monotonic `clock` shows `ends`.

    `speed` is how much work a second is done, infinite where nobody has measured it: then time is not planned, only
    kept.
    """

    work: Flops
    most_work: float = math.inf
    ends: float = math.inf
    speed: float = math.inf
    clock: Callable[[], float] = _now

    @classmethod
    def of(cls, bench: Workbench, options: MergeOptions, checkpoint: Checkpoint) -> Bounds:
        """The bounds of the options; time that an interrupted merge had spent counts."""
        left = math.inf if options.max_minutes is None else 60 * options.max_minutes - checkpoint.seconds
        most_work, clock = math.inf if options.max_work is None else options.max_work, bench.crew.clock
        return cls(bench.work, most_work, clock() + left, clock=clock)

    def part(self, share: float) -> Bounds:
        """Bounds that leave the rest of the work, and of the time that is left now, to others."""
        now = self.clock()
        return replace(self, most_work=share * self.most_work, ends=now + share * (self.ends - now))

    def of_the_rest(self, share: float) -> Bounds:
        """Bounds that leave the rest of the work and time that are left now to others."""
        now = self.clock()
        most_work = self.work.total + share * (self.most_work - self.work.total)
        return replace(self, most_work=most_work, ends=now + share * (self.ends - now))

    @property
    def work_left(self) -> float:
        """The work that may still be done, at most what there is time for."""
        seconds = max(0.0, self.ends - self.clock())
        in_time = seconds * self.speed if seconds else 0.0
        return max(0.0, min(self.most_work - self.work.total, in_time))

    @property
    def over(self) -> bool:
        """Whether nothing more may begin."""
        return self.work.total >= self.most_work or self.clock() >= self.ends
