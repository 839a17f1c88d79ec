"""Learning rate, epochs and patience, chosen on val by short trials of which the better half goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import nn

from merger.journal import Journal
from merger.training import Diverged, Recipe
from merger.workbench import Workbench

RATES = (2e-4, 5e-4, 1e-3)
SHARES = (0.25, 0.5, 1.0)
"""How much of the recipe's epochs the trials of each rung take; each is annealed to its own end."""
ENOUGH = 0.995
"""From this mean ratio on there is nothing left to choose by."""
WORTH_IT = 0.005
"""Twice the epochs are worth it where they raise the mean ratio of the best by more than this."""
LEAST_EPOCHS = 2

Make = Callable[[], Mapping[str, nn.Module]]


def choose_rate(bench: Workbench, make: Make, recipe: Recipe, journal: Journal | None = None) -> float:
    """The candidate after whose one-epoch trial the mean ratio on val is highest; `make` gives fresh models."""
    reached = _rung(bench, make, replace(recipe, epochs=1), RATES, journal or Journal())
    return max(reached, key=lambda rate: reached[rate]) if reached else min(RATES)


def choose_recipe(bench: Workbench, make: Make, recipe: Recipe, journal: Journal | None = None) -> Recipe:
    """The recipe with rate, epochs and patience chosen by successive halving (Jamieson and Talwalkar 2016).

    All rates are tried for a quarter of the recipe's epochs, the better half for half of them, the best for all. The
    epochs become those of the first trial that twice as many hardly improve, and never more than they were. Trials
    end when the originals are nearly reached.
    """
    journal, rates, history = journal or Journal(), list(RATES), []
    for share in SHARES:
        epochs = max(1, round(share * recipe.epochs))
        reached = _rung(bench, make, replace(recipe, epochs=epochs), rates, journal)
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


def _rung(
    bench: Workbench, make: Make, recipe: Recipe, rates: list[float] | tuple[float, ...], journal: Journal
) -> dict[float, float]:
    """Mean ratio on val after a trial of each rate; those that diverge are left out."""
    reached = {}
    for rate in rates:
        found = journal.step(
            f"{recipe.epochs} epochs at {rate:g}", partial(_trial, bench, make, replace(recipe, rate=rate), journal)
        )
        bench.progress("rate", rate=rate, epochs=recipe.epochs, ratio=found)
        if found is not None:
            reached[rate] = found
    return reached


def _trial(bench: Workbench, make: Make, recipe: Recipe, journal: Journal) -> float | None:
    models = make()
    training = bench.training(models, recipe)
    journal.training("training", training)
    try:
        while training.epochs < recipe.epochs:
            training.epoch()
    except Diverged:
        return None
    ratios = [journal.step(query, partial(bench.ratio, query, model)) for query, model in models.items()]
    return sum(ratios) / len(ratios)
