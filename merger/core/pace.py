"""How fast this machine trains, so that what is bounded in time can be planned in work; and how much fits at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from merger.checkpoint import StepCache
from merger.core.context import MergeContext
from merger.core.snapshot import ModelSnapshot
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from merger.training.step_config import StepConfig, first_that_fits, layouts
from models.errors import InputError
from models.sharing.plan import SharingPlan

STEPS = 3
"""Steps that are timed, the first of which only warms up."""


def training_speed(
    ctx: MergeContext, plan: SharingPlan, recipe: Recipe, clock: Callable[[], float] = time.monotonic
) -> float:
    """The work (image passes x FLOPs) that a joint training of all who share does in a second; inf where none is seen.

    Copies of the originals are tied and trained for a few steps, which count as work.
    """
    models, few = begins(plan).models(ctx), replace(recipe, epochs=1, frames_per_epoch=STEPS * recipe.batch)
    training = ctx.training(models, few, (), plan)
    seen = [(clock(), ctx.flops.total)]
    training.after_step = lambda: seen.append((clock(), ctx.flops.total))
    with suppress(Diverged):
        training.epoch()
    (began, before), (ended, after) = seen[1 if len(seen) > 2 else 0], seen[-1]
    return ctx.crew.first((after - before) / (ended - began) if ended > began else math.inf)


def begins(plan: SharingPlan, queries: Collection[str] = ()) -> ModelSnapshot:
    """The originals of these queries, or of all who share, tied under a plan: what a training begins with."""
    return ModelSnapshot(plan, {query: {} for query in sorted(queries or plan.queries())})


def laid_out(ctx: MergeContext, start: ModelSnapshot, recipe: Recipe, journal: StepCache) -> Recipe:
    """The recipe as it fits the cards of this merge: tried once, kept in the journal, and told in one line.

    What is tried is the training of all that `start`, with the precision it has. All trainings that follow are laid out
    so (`Workbench.training`). On a processor nothing is tried or changed.
    """
    if ctx.device.type == "cpu":
        return recipe
    mine, possible = ctx.crew.mine(start.states), layouts(recipe)
    found = possible[journal.step("layout", partial(_tried, ctx, start, recipe, possible))]
    if ctx.fitting.layout is None:
        ctx.fitting.take(found)
    chosen = ctx.fitting.layout or found
    if not chosen.place([ctx.train[query].prepared for query in mine], ctx.device):
        raise InputError("the card", "has no room for the train frames that it had room for", "run nothing beside it")
    return chosen.recipe(recipe)


def _tried(ctx: MergeContext, start: ModelSnapshot, recipe: Recipe, possible: Sequence[StepConfig]) -> int:
    """The layout that fits all processes; norms take the statistics of a node, so all have the same."""
    own = {query: start.states[query] for query in ctx.crew.mine(start.states)}
    attempt = partial(_fits, ctx, replace(start, states=own), recipe)
    precisions = ctx.settled(start.states)
    found = max(ctx.everywhere(lambda: {str(ctx.crew.rank): first_that_fits(possible, attempt)}).values())
    full = [str(one) for one in possible[:found]]
    ctx.progress("layout", chosen=str(possible[found]), full=full, precisions=precisions)
    return found


def _fits(ctx: MergeContext, start: ModelSnapshot, recipe: Recipe, layout: StepConfig) -> bool:
    """Whether steps of training these queries so leave the card's memory enough; a process without queries has it."""
    if not start.states:
        return True
    if not layout.place([ctx.train[query].prepared for query in start.states], ctx.device):
        return False
    training = ctx.training(start.models(ctx), layout.trial(recipe), (), start.plan)
    training.fitting = None
    with suppress(Diverged):
        training.epoch()
    return True
