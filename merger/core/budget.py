"""When a merge has had its time or its work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from merger.checkpoint import Checkpoint
from merger.core.context import MergeContext
from merger.core.method import MergeOptions
from merger.training.recipe import Flops


def _now() -> float:
    return time.monotonic()


@dataclass(frozen=True)
class Budget:
    """Nothing more is begun once `work` reaches `most_work`, or the monotonic `clock` shows `ends`.

    `speed` is how much work a second is done, infinite where nobody has measured it: then time is not planned, only
    kept.
    """

    flops: Flops
    max_flops: float = math.inf
    ends: float = math.inf
    speed: float = math.inf
    clock: Callable[[], float] = _now

    @classmethod
    def of(cls, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Budget:
        """The bounds of the options; time that an interrupted merge had spent counts."""
        left = math.inf if options.max_minutes is None else 60 * options.max_minutes - checkpoint.seconds
        max_flops, clock = math.inf if options.max_flops is None else options.max_flops, ctx.group.clock
        return cls(ctx.flops, max_flops, clock() + left, clock=clock)

    def fraction(self, share: float) -> Budget:
        """Bounds that leave the rest of the work, and of the time that is left now, to others."""
        now = self.clock()
        return replace(self, max_flops=share * self.max_flops, ends=now + share * (self.ends - now))

    def fraction_of_rest(self, share: float) -> Budget:
        """Bounds that leave the rest of the work and time that are left now to others."""
        now = self.clock()
        max_flops = self.flops.total + share * (self.max_flops - self.flops.total)
        return replace(self, max_flops=max_flops, ends=now + share * (self.ends - now))

    @property
    def flops_left(self) -> float:
        """The work that may still be done, at most what there is time for."""
        seconds = max(0.0, self.ends - self.clock())
        in_time = seconds * self.speed if seconds else 0.0
        return max(0.0, min(self.max_flops - self.flops.total, in_time))

    @property
    def over(self) -> bool:
        """Whether nothing more may begin."""
        return self.flops.total >= self.max_flops or self.clock() >= self.ends
