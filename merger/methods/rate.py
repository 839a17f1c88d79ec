"""Learning rate, epochs and patience, chosen on val by short trials of which the better half goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from merger.bench.standing import Standing, training_flops
from merger.bench.workbench import Workbench
from merger.journal.steps import Journal
from merger.training.loop import Diverged, Recipe
from merger.workers.jobs import Job, run

RATES = (2e-4, 5e-4, 1e-3)
SHARES = (0.25, 0.5, 1.0)
"""How much of the recipe's epochs the trials of each rung take; each is annealed to its own end."""
ENOUGH = 0.995
"""From this mean ratio on there is nothing left to choose by."""
WORTH_IT = 0.005
"""Twice the epochs are worth it where they raise the mean ratio of the best by more than this."""
LEAST_EPOCHS = 2
CHOOSING = "choosing how fast and how long to train"


def choose_recipe(bench: Workbench, start: Standing, recipe: Recipe, journal: Journal | None = None) -> Recipe:
    """The recipe with rate, epochs and patience chosen by successive halving (Jamieson and Talwalkar 2016).

    Every trial trains the models of `start`, those of a rung beside each other where there are workers. All rates are
    tried for a quarter of the recipe's epochs, the better half for half of them, the best for all. The epochs become
    those of the first trial that twice as many hardly improve, and never more than they were. Trials end when the
    originals are nearly reached.
    """
    journal, rates, history = journal or Journal(), list(RATES), []
    known: dict[tuple[int, float], float | None] = {}
    for share in SHARES:
        epochs = max(1, round(share * recipe.epochs))
        new = [rate for rate in rates if (epochs, rate) not in known]
        found = _rung(bench, start, replace(recipe, epochs=epochs), new, journal)
        known.update({(epochs, rate): ratio for rate, ratio in zip(new, found, strict=True)})
        reached = {rate: ratio for rate in rates if (ratio := known[epochs, rate]) is not None}
        if not reached:
            break
        rates = sorted(reached, key=lambda rate: -reached[rate])
        history.append((epochs, reached[rates[0]]))
        if history[-1][1] >= ENOUGH:
            break
        rates = rates[: (len(rates) + 1) // 2]
    if not history:
        return replace(recipe, rate=min(RATES))
    epochs = recipe.epochs
    for (fewer, before), (_, after) in reversed(list(pairwise(history))):
        if after <= before + WORTH_IT:
            epochs = min(recipe.epochs, max(LEAST_EPOCHS, fewer))
    return replace(recipe, rate=rates[0], epochs=epochs, patience=max(recipe.patience, epochs // 4))


def most_work(bench: Workbench, queries: Sequence[str], recipe: Recipe) -> float:
    """About what it takes at most to choose a recipe for these queries."""
    trials = sum(share * math.ceil(len(RATES) / 2**rung) for rung, share in enumerate(SHARES))
    return trials * training_flops(bench, queries, recipe)


def _rung(
    bench: Workbench, start: Standing, recipe: Recipe, rates: Iterable[float], journal: Journal
) -> list[float | None]:
    """Mean ratio on val after a trial of each rate; None where it diverges."""
    jobs = []
    for rate in rates:
        one = replace(recipe, rate=rate)
        given = {"start": start.to_plain(), "recipe": dict(one.__dict__)}
        queries = tuple(start.states)
        jobs.append(Job(f"rate {rate:g}", trial, given, queries, training_flops(bench, queries, one)))
    return run(bench, journal, f"{recipe.epochs} epochs", jobs) if jobs else []


def trial(bench: Workbench, journal: Journal, start: Mapping[str, Any], recipe: Mapping[str, Any]) -> float | None:
    """The job: train by this recipe; the mean ratio on val, None where it diverges."""
    models, how = Standing.from_plain(start).models(bench), Recipe(**recipe)
    training = bench.training(models, how)
    journal.training("training", training)
    ratio: float | None = None
    try:
        while training.epochs < how.epochs:
            training.epoch()
        ratios = [journal.step(query, partial(bench.ratio, query, model)) for query, model in models.items()]
        ratio = sum(ratios) / len(ratios)
    except Diverged:
        pass
    bench.progress("rate", rate=how.rate, epochs=how.epochs, ratio=ratio)
    return ratio
