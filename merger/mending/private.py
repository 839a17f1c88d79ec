"""Training what one query has for itself, while all that it shares with others stands still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from merger.checkpoint import State, StepCache, snapshot
from merger.core.attempt import train_while
from merger.core.context import CALIBRATION_FRAMES, MergeContext
from merger.core.snapshot import evaluate_all
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.layers import weight_of
from models.sharing.plan import SharingPlan

GENTLE = 0.25
"""The part of the rate at which a model is mended alone: it stands where a falling rate has brought it, and is near."""
BOLD = 80
"""Its norms and biases move so many times as fast: alone they bear 1e-2, and need it to come far."""
LONG = 2
"""An epoch of one query alone has so many times the frames that it has in one of all."""


def alone(recipe: Recipe) -> Recipe:
    """How one query is trained alone, from how all are together: its norms far bolder than what else it has."""
    epochs, frames = max(1, recipe.epochs // 2), LONG * recipe.frames_per_epoch
    return replace(recipe, epochs=epochs, frames_per_epoch=frames, norms=BOLD)


def train_private(
    ctx: MergeContext,
    begins: Sequence[State],
    plan: SharingPlan,
    query: str,
    recipe: Recipe,
    required: float,
    journal: StepCache,
) -> dict[str, Any]:
    """Train what is private under the plan, from that of the states which answers best: the best ratio on val, its
    `state`, the epoch it was reached after, and how many were `trained`.

    Nothing is trained where it is enough to measure the norms again.
    """
    begun = journal.step("begun", partial(best_begun, ctx, begins, plan, query, journal))
    model = ctx.models([query], {query: begun["state"]}, plan)[query]
    rest_shared({query: model}, plan)
    best: dict[str, Any] = journal.state("best")
    if not best:
        best.update(**begun, epochs=0, trained=0)
    gentle = replace(recipe, seed=recipe.seed + 1, rate=GENTLE * recipe.rate)
    epochs = train_while(ctx, {query: model}, gentle, journal, plan, recipe.evaluate_from)
    try:
        while best["ratio"] < required and (ratios := next(epochs, None)) is not None:
            best["trained"] += recipe.evaluate_from if not best["trained"] else 1
            if ratios[query] > best["ratio"]:
                best.update(ratio=ratios[query], state=snapshot(model), epochs=best["trained"])
    except Diverged:
        pass
    return dict(best)


def best_begun(
    ctx: MergeContext, begins: Sequence[State], plan: SharingPlan, query: str, journal: StepCache
) -> dict[str, Any]:
    """The first of the best of these states, with the norms that serve it better, and its ratio on val."""
    found = list[dict[str, Any]]()
    for number, state in enumerate(begins):
        model = ctx.models([query], {query: state}, plan)[query]
        rest_shared({query: model}, plan)
        ratios = evaluate_all(ctx, journal, f"beginning {number}", {query: model}, plan, CALIBRATION_FRAMES)
        found.append({"ratio": ratios[query], "state": snapshot(model)})
    return max(found, key=lambda one: one["ratio"])


def rest_shared(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Let training leave alone what these models share with others."""
    for members in plan.shared:
        for query, path in members if len({query for query, _ in members}) > 1 else ():
            if query in models:
                owner, attribute = weight_of(models[query], path)
                getattr(owner, attribute).requires_grad_(False)
