"""How fast this machine trains, so that what is bounded in time can be planned in work; and how much fits at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.fitting import Layout, first_that_fits, layouts
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.errors import InputError
from models.sharing.plan import SharingPlan, tie

STEPS = 3
"""Steps that are timed, the first of which only warms up."""


def training_speed(
    bench: Workbench, queries: Sequence[str], recipe: Recipe, clock: Callable[[], float] = time.monotonic
) -> float:
    """The work (image passes x FLOPs) that a joint training of these queries does in a second; inf where none is seen.

    Copies of the originals are trained for a few steps, which count as work.
    """
    training = bench.training(bench.models(queries), replace(recipe, epochs=1, frames_per_epoch=STEPS * recipe.batch))
    seen = [(clock(), bench.work.total)]
    training.after_step = lambda: seen.append((clock(), bench.work.total))
    with suppress(Diverged):
        training.epoch()
    (began, before), (ended, after) = seen[1 if len(seen) > 2 else 0], seen[-1]
    return bench.crew.first((after - before) / (ended - began) if ended > began else math.inf)


def laid_out(bench: Workbench, plan: SharingPlan, recipe: Recipe, journal: Journal) -> Recipe:
    """The recipe as it fits the cards of this merge: tried once, kept in the journal, and told in one line.

    What is tried is the training of all, with the precision it has. On a processor nothing is tried or changed.
    """
    if bench.device.type == "cpu":
        return recipe
    mine, possible = bench.crew.mine(sorted(plan.queries())), layouts(recipe)
    found = possible[journal.step("layout", partial(_tried, bench, plan, recipe, possible))]
    if bench.fitting.layout is None:
        bench.fitting.take(found)
    chosen = bench.fitting.layout or found
    if not chosen.place([bench.train[query].prepared for query in mine], bench.device):
        raise InputError("the card", "has no room for the train frames that it had room for", "run nothing beside it")
    return chosen.recipe(recipe)


def _tried(bench: Workbench, plan: SharingPlan, recipe: Recipe, possible: Sequence[Layout]) -> int:
    """The layout that fits all processes; norms take the statistics of a node, so all have the same."""
    mine = bench.crew.mine(sorted(plan.queries()))
    attempt = partial(_fits, bench, plan, mine, recipe)
    own = bench.everywhere(lambda: {str(bench.crew.rank): first_that_fits(possible, attempt)})
    found = max(own.values())
    precisions = bench.settled(sorted(plan.queries()))
    full = [str(one) for one in possible[:found]]
    bench.progress("layout", chosen=str(possible[found]), full=full, precisions=precisions)
    return found


def _fits(bench: Workbench, plan: SharingPlan, queries: Sequence[str], recipe: Recipe, layout: Layout) -> bool:
    """Whether steps of training these queries so leave the card's memory enough."""
    if not layout.place([bench.train[query].prepared for query in queries], bench.device):
        return False
    models = bench.models(queries, plan=plan)
    tie(models, plan)
    training = bench.training(models, layout.trial(recipe), (), plan)
    training.fitting = None
    with suppress(Diverged):
        training.epoch()
    return True
