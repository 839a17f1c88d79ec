"""What fewer bits have moved, learnt by what a query has for itself: its norms and biases, while all codes stand still.

They are float32 and private anyway, so that this costs no byte, and nobody else is touched. Training the norms alone
goes far (Frankle, Schwab and Morcos, Training BatchNorm and Only BatchNorm, ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from merger.checkpoint import State, StepCache, snapshot
from merger.core.attempt import train_while
from merger.core.context import MergeContext
from merger.core.snapshot import training_flops
from merger.mending.private import rest_shared
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.plan import SharingPlan

FIRST = Recipe(rate=1e-2, epochs=4, frames_per_epoch=2048)
"""Norms alone bear a high rate and need it; 2e-3 comes to much less (docs/lab-notes.md)."""
AGAIN = Recipe(rate=5e-3, epochs=2, frames_per_epoch=1024)
"""For norms that were learnt before, for other widths."""
HOPELESS = 0.85
"""Whoever has less than this part of what it needs after an epoch does not come to it in the others."""


def learn_norms(
    ctx: MergeContext,
    query: str,
    model: nn.Module,
    plan: SharingPlan,
    recipe: Recipe,
    need: float,
    journal: StepCache,
) -> dict[str, Any]:
    """Train what does not rest of a model, to the end of the annealing: the best of several epochs would flatter.

    Returns its `ratio` on val and its `norms`, a state of all that could move; None where nothing can, the loss
    diverged, or it was given up, far below what it needs.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return {"ratio": 0.0, "norms": None}
    found: dict[str, Any] = {"ratio": 0.0, "norms": None}
    evaluated = journal.state("evaluated")
    try:
        for ratios in train_while(ctx, {query: model}, recipe, journal, plan):
            evaluated["epochs"] = evaluated.get("epochs", 0) + 1
            if evaluated["epochs"] == recipe.epochs:
                found = {"ratio": ratios[query], "norms": _moved(model)}
            elif ratios[query] < HOPELESS * need:
                break
    except Diverged:
        pass
    return found


def rest_codes(query: str, model: nn.Module, plan: SharingPlan, packed: Iterable[str]) -> None:
    """Let training leave alone what a model shares with others, and what is stored in codes (state dict keys)."""
    rest_shared({query: model}, plan)
    keys = set(packed)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in keys:
            parameter.requires_grad_(False)


def max_flops(ctx: MergeContext, query: str) -> float:
    """About what it takes at most."""
    return training_flops(ctx, [query], FIRST)


def _moved(model: nn.Module) -> State:
    """What training may have moved: parameters that learn, and statistics."""
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in snapshot(model).items() if name not in still}
