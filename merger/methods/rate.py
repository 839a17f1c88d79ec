"""How a method trains, chosen on val by short trials of which the better half goes on: rate, epochs, and more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from merger.checkpoint import Checkpoint, StepCache
from merger.core.context import MergeContext
from merger.core.snapshot import ModelSnapshot, training_flops
from merger.jobs import Job, run_jobs
from merger.training.loop import Diverged
from merger.training.recipe import Recipe

RATES = (2e-4, 5e-4, 1e-3)
FEATURES = (0.0, 1.0)
"""What the features before the heads may weigh beside the outputs."""
PRIVATE = (0.1, 1.0)
"""At which part of the rate private weights may move."""
SHARES = (0.25, 0.5, 1.0)
"""How much of the recipe's epochs the trials of each rung take; each is annealed to its own end."""
ENOUGH = 0.995
"""From this mean ratio on there is nothing left to choose by."""
WORTH_IT = 0.005
"""Twice the epochs are worth it where they raise the mean ratio of the best by more than this."""
MIN_EPOCHS = 2
CHOOSING = "choosing how fast and how long to train"


def at_rates(recipe: Recipe) -> list[Recipe]:
    """The recipe at every rate."""
    return [replace(recipe, rate=rate) for rate in RATES]


def in_every_way(recipe: Recipe) -> list[Recipe]:
    """The recipe at every rate, with features watched and not, private weights as fast as the others and slower.

    Features that a recipe watches already keep their weight.
    """
    watched = (recipe.features,) if recipe.features else FEATURES
    ways = [replace(recipe, features=features, private=private) for features in watched for private in PRIVATE]
    return [one for way in ways for one in at_rates(way)]


def chosen(ctx: MergeContext, checkpoint: Checkpoint, choose: Callable[[], Recipe]) -> Recipe:
    """The recipe that a search comes to; its work is told in the log apart from that of the method."""

    def search() -> dict[str, Any]:
        before = checkpoint.step("before", lambda: ctx.flops.total)
        recipe = choose()
        return {"recipe": dict(recipe.__dict__), "flops": ctx.flops.total - before}

    found = checkpoint.step("recipe", search)
    ctx.flops.total -= found["flops"]
    tell(ctx, checkpoint, Recipe(**found["recipe"]), found["flops"])
    return Recipe(**found["recipe"])


def tell(ctx: MergeContext, checkpoint: Checkpoint, recipe: Recipe, search_flops: float = 0.0) -> None:
    """Tell progress and the log by which recipe a method trains, as laid out, and what work it took to find it."""
    recipe = ctx.memory.config(recipe).apply(recipe)
    if not any("recipe" in row for row in checkpoint.log):
        checkpoint.add_row({"recipe": dict(recipe.__dict__), "search_flops": search_flops, "flops": ctx.flops.total})
    told = {name: getattr(recipe, name) for name in ("rate", "epochs", "features", "private")}
    ctx.progress("recipe", **told, search_flops=search_flops)


def choose_recipe(
    ctx: MergeContext, start: ModelSnapshot, recipes: Sequence[Recipe], journal: StepCache | None = None
) -> Recipe:
    """The best of these recipes with epochs and patience chosen, too, by successive halving.

    (Jamieson and Talwalkar 2016.) Every trial trains the models of `start`, those of a rung beside each other where
    there are workers. All are tried for a quarter of their epochs, the better half for half of them, the best of those
    for all. The epochs become those of the first trial that twice as many hardly improve, and never more than they
    were. Trials end when the originals are nearly reached.
    """
    journal, left, history = journal or StepCache(), list(recipes), []
    most = recipes[0].epochs
    known: dict[tuple[int, Recipe], float | None] = {}
    for share in SHARES:
        epochs = max(1, round(share * most))
        new = [recipe for recipe in left if (epochs, recipe) not in known]
        found = _rung(ctx, start, [replace(recipe, epochs=epochs) for recipe in new], journal)
        known.update({(epochs, recipe): ratio for recipe, ratio in zip(new, found, strict=True)})
        reached = {recipe: ratio for recipe in left if (ratio := known[epochs, recipe]) is not None}
        if not reached:
            break
        left = sorted(reached, key=lambda recipe: -reached[recipe])
        history.append((epochs, reached[left[0]]))
        if history[-1][1] >= ENOUGH:
            break
        left = left[: (len(left) + 1) // 2]
    if not history:
        return min(recipes, key=lambda recipe: recipe.rate)
    epochs = most
    for (fewer, before), (_, after) in reversed(list(pairwise(history))):
        if after <= before + WORTH_IT:
            epochs = min(most, max(MIN_EPOCHS, fewer))
    return replace(left[0], epochs=epochs, patience=max(left[0].patience, epochs // 4))


def max_flops(ctx: MergeContext, queries: Sequence[str], recipes: Sequence[Recipe]) -> float:
    """About what it takes at most to choose one of these recipes for these queries."""
    trials = sum(share * math.ceil(len(recipes) / 2**rung) for rung, share in enumerate(SHARES))
    return trials * training_flops(ctx, queries, recipes[0])


def _rung(ctx: MergeContext, start: ModelSnapshot, recipes: Sequence[Recipe], journal: StepCache) -> list[float | None]:
    """Mean ratio on val after a trial of each recipe; None where it diverges."""
    jobs = []
    for one in recipes:
        given = {"start": start.to_plain(), "recipe": dict(one.__dict__)}
        queries = tuple(start.states)
        name = f"rate {one.rate:g}, features {one.features:g}, private {one.private:g}"
        jobs.append(Job(name, trial, given, queries))
    return run_jobs(ctx, journal, f"{recipes[0].epochs} epochs", jobs) if jobs else []


def trial(ctx: MergeContext, journal: StepCache, start: Mapping[str, Any], recipe: Mapping[str, Any]) -> float | None:
    """The job: train by this recipe; the mean ratio on val, None where it diverges."""
    models, how = ModelSnapshot.from_plain(start).models(ctx), Recipe(**recipe)
    training = ctx.training(models, how)
    journal.training("training", training)
    ratio: float | None = None
    try:
        while training.epochs < how.epochs:
            training.epoch()
        ratios = [journal.step(query, partial(ctx.ratio, query, model)) for query, model in models.items()]
        ratio = sum(ratios) / len(ratios)
    except Diverged:
        pass
    told = {name: getattr(how, name) for name in ("rate", "epochs", "features", "private")}
    ctx.progress("rate", **told, ratio=ratio)
    return ratio
