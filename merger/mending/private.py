"""Training what one query has for itself, while all that it shares with others stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from merger.bench.attempt import train_while
from merger.bench.merged import Merged, State, snapshot
from merger.bench.standing import judge_all
from merger.bench.workbench import CALIBRATION_FRAMES, Workbench
from merger.journal.steps import Journal
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.layers import weight_of
from models.sharing.plan import SharingPlan

GENTLE = 0.25
"""The part of the rate at which a model is mended alone: it stands where a falling rate has brought it, and is near."""


def train_private(
    bench: Workbench, merged: Merged, plan: SharingPlan, query: str, recipe: Recipe, required: float, journal: Journal
) -> dict[str, Any]:
    """Train what is private under the plan; the best ratio on val, its state, and what a next step may carry on.

    Nothing is trained where it is enough to measure the norms again.
    """
    model = bench.models([query], merged.states, plan)[query]
    rest_shared({query: model}, plan)
    best: dict[str, Any] = journal.part("best")
    if not best:
        ratios = judge_all(bench, journal, "as it is", {query: model}, plan, CALIBRATION_FRAMES)
        best.update(ratio=ratios[query], state=snapshot(model), epochs=0, trained=0)
    gentle = replace(recipe, seed=recipe.seed + 1, rate=GENTLE * recipe.rate)
    epochs = train_while(bench, {query: model}, gentle, journal, plan)
    try:
        while best["ratio"] < required and (ratios := next(epochs, None)) is not None:
            best["trained"] += 1
            if ratios[query] > best["ratio"]:
                best.update(ratio=ratios[query], state=snapshot(model), epochs=best["trained"])
    except Diverged:
        pass
    known: State = dict(merged.states[query])
    carried = {name: tensor for name, tensor in best["state"].items() if name in known}
    return {**best, "carried": carried if plan.shared == merged.plan.shared else {}}


def rest_shared(models: Mapping[str, nn.Module], plan: SharingPlan) -> None:
    """Let training leave alone what these models share with others."""
    for members in plan.shared:
        for query, path in members if len({query for query, _ in members}) > 1 else ():
            if query in models:
                owner, attribute = weight_of(models[query], path)
                getattr(owner, attribute).requires_grad_(False)
