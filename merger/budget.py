"""Budgets of time and FLOPs; the speed at which the originals were evaluated converts one into the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gemel.merger.checkpoint import Checkpoint
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext
from gemel.merger.training.recipe import Flops


def reserve_end(ctx: MergeContext, options: MergeOptions) -> MergeOptions:
    """The options with less time, by what follows every search: models that are proven step by step, and test.

    That is estimated by the time that the same frames took with the originals.
    """
    if options.max_minutes is None:
        return options

    def count_passes() -> dict[str, tuple[float, float]]:
        found = dict[str, tuple[float, float]]()
        for query in ctx.group.own(ctx.queries):
            flops, footage = ctx.flops.of(ctx.queries[query]), ctx.data.footage[query]
            proving = len(ctx.val[query]) + (len(footage.places) if footage else 0)
            steps = proving * (1 + len(options.bits)) if ctx.proves and query in ctx.judged else 0
            found[query] = flops * (steps + 2 * len(ctx.test[query])), flops * (proving + len(ctx.search[query]))
        return found

    to_come, evaluated = map(sum, zip(*ctx.gather(count_passes).values(), strict=True))
    return replace(options, max_minutes=options.max_minutes - to_come / evaluated * ctx.evaluating_s / 60)


@dataclass(frozen=True)
class Budget:
    """No step begins once `flops` reaches `max_flops`, or the monotonic `clock` (seconds) reaches `ends`.

    `speed` is FLOPs per second, infinite if not measured: then time is respected but not planned.
    """

    flops: Flops
    max_flops: float = math.inf
    ends: float = math.inf
    speed: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Budget:
        """The budget of the options; time counts from the beginning of the merge, without that between its starts."""
        seconds = math.inf if options.max_minutes is None else 60 * options.max_minutes
        left = ctx.group.broadcast(seconds - checkpoint.elapsed_s)
        max_flops, clock = math.inf if options.max_flops is None else options.max_flops, ctx.group.clock
        return cls(ctx.flops, max_flops, clock() + left, ctx.speed, clock)

    def fraction(self, share: float) -> Budget:
        """This fraction of all FLOPs and of the time left now."""
        now = self.clock()
        return replace(self, max_flops=share * self.max_flops, ends=now + share * (self.ends - now))

    def divide(self, count: int) -> Callable[[], Budget]:
        """What gives each of so many queries an equal share of the FLOPs left now, and all the time that is left.

        It may be called by another process, on another machine too; FLOPs count from the call on.
        """
        share, ends_at = self.flops_left / count, time.time() + self.ends - self.clock()

        def take() -> Budget:
            return Budget(self.flops, self.flops.total + share, time.monotonic() + ends_at - time.time())

        return take

    @property
    def flops_left(self) -> float:
        """FLOPs that may still be spent, at most what there is time for."""
        seconds = max(0.0, self.ends - self.clock())
        in_time = seconds * self.speed if seconds else 0.0
        return max(0.0, min(self.max_flops - self.flops.total, in_time))

    @property
    def over(self) -> bool:
        """Whether no further step may begin."""
        return self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        """Whether a step that takes so long could not end in time."""
        return self.flops.total >= self.max_flops or self.clock() + seconds >= self.ends
