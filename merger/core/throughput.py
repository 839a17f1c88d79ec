"""How fast this machine trains: time limits are planned as FLOPs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from merger.core.context import MergeContext
from merger.core.snapshot import ModelSnapshot
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

TIMED_STEPS = 3
"""The first one only warms up."""


def training_speed(
    ctx: MergeContext, plan: SharingPlan, recipe: Recipe, clock: Callable[[], float] = time.monotonic
) -> float:
    """Image passes x FLOPs a second of a joint training of all queries that share; inf if no time passes."""
    models, few = (
        initial_snapshot(plan).models(ctx),
        replace(recipe, epochs=1, frames_per_epoch=TIMED_STEPS * recipe.batch),
    )
    training = ctx.training(models, few)
    seen = [(clock(), ctx.flops.total)]
    training.after_step = lambda: seen.append((clock(), ctx.flops.total))
    with suppress(Diverged):
        training.epoch()
    (began, before), (ended, after) = seen[1 if len(seen) > 2 else 0], seen[-1]
    return ctx.group.broadcast((after - before) / (ended - began) if ended > began else math.inf)


def initial_snapshot(plan: SharingPlan, queries: Collection[str] = ()) -> ModelSnapshot:
    """The originals of these queries, or of all that share, tied under a plan: what a training begins with."""
    return ModelSnapshot(plan, {query: {} for query in sorted(queries or plan.queries())})
