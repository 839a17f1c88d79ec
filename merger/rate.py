"""The learning rate, chosen on val by a short trial of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from merger.training import Diverged, Recipe
from merger.workbench import Workbench

RATES = (2e-4, 5e-4, 1e-3)


def choose_rate(bench: Workbench, make: Callable[[], Mapping[str, nn.Module]], recipe: Recipe) -> float:
    """The candidate after whose one-epoch trial the mean ratio on val is highest; `make` gives fresh models."""
    reached = {}
    for rate in RATES:
        models = make()
        training = bench.training(models, replace(recipe, rate=rate, epochs=1))
        try:
            training.epoch()
        except Diverged:
            continue
        reached[rate] = sum(bench.ratio(query, model) for query, model in models.items()) / len(models)
        bench.progress("rate", rate=rate, ratio=reached[rate])
    return max(reached, key=lambda rate: reached[rate]) if reached else min(RATES)
