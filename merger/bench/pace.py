"""How fast this machine trains, so that what is bounded in time can be planned in work; and how much fits at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from merger.bench.workbench import Workbench
from merger.training.loop import Diverged, Recipe
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


def fitting_node(bench: Workbench, plan: SharingPlan, recipe: Recipe) -> int:
    """The frames that a node may have on the cards of this merge: as many as the recipe says, or half, a quarter.

    A step of the real training is tried, of what each process has. Norms take the statistics of a node, so what comes
    out depends on it: it is tried once, and told. On a processor nothing is tried.
    """
    if bench.device.type == "cpu":
        return recipe.node
    fits = partial(_fits, bench, plan, bench.crew.mine(sorted(plan.queries())), recipe)
    own = bench.everywhere(lambda: {str(bench.crew.rank): halved(min(recipe.node, recipe.batch), fits)})
    node = min(own.values())
    if node < min(recipe.node, recipe.batch):
        bench.progress("warning", text=f"a step of {recipe.node} frames at once does not fit: {node} at once instead")
    return node if node < min(recipe.node, recipe.batch) else recipe.node


def halved(most: int, fits: Callable[[int], bool]) -> int:
    """The first of `most`, its half, the half of that that fits; InputError where not even the last one does."""
    node = most
    while not fits(node):
        if node % 2:
            remedy = "merge fewer queries, give smaller inputs, or start several processes with torchrun"
            raise InputError("the card", f"is full with {node} frames at once", remedy)
        node //= 2
    return node


def _fits(bench: Workbench, plan: SharingPlan, queries: Sequence[str], recipe: Recipe, node: int) -> bool:
    """Whether a step of training these queries with so many frames at once leaves the card's memory enough."""
    try:
        models = bench.models(queries, plan=plan)
        tie(models, plan)
        with suppress(Diverged):
            bench.training(
                models, replace(recipe, node=node, epochs=1, frames_per_epoch=recipe.batch), (), plan
            ).epoch()
    except torch.OutOfMemoryError:
        return False
    finally:
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return True
