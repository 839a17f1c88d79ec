"""Norms, head and private layers of single queries, trained while what they share stays frozen.

Shared weights are as another model has them, which keeps all of its answers. Queries do not touch each other, so each
trains alone until its ratio suffices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from gemel.merger.checkpoint import State, Step, StepCache, snapshot, storable
from gemel.merger.config import MEASUREMENT
from gemel.merger.evaluate import evaluate_queries, training_flops
from gemel.merger.methods.epochs import freeze_shared, train_epochs
from gemel.merger.methods.ladder import MergeCandidate
from gemel.merger.methods.registry import MergeTask
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import Recipe


@storable
@dataclass(frozen=True)
class Trained:
    """One query after its training: its best ratio, and its state there."""

    ratio: float
    state: State


def train_private(task: MergeTask, tied: MergeCandidate) -> MergeCandidate:
    """The candidate with every query below its requirement trained alone.

    Each has an equal share of the FLOPs left, so the result does not depend on their order.
    """
    ctx, cache = task.ctx, task.checkpoint
    below = sorted(query for query, ratio in tied.ratios.items() if ratio < task.required[query])
    if not below or task.budget.over:
        return tied
    take_budget = task.budget.divide(len(below))

    def train(own: StepCache, query: str) -> Trained:
        alone = replace(task, recipe=private_recipe(task), budget=take_budget(), checkpoint=own)
        models = ctx.models([query], {query: tied.states[query]})
        freeze_shared(models, tied.plan)
        return train_schedules(alone, models)

    trained = ctx.for_each_query(cache, Step.PRIVATE, below, train)
    states = {**tied.states, **{query: one.state for query, one in trained.items()}}
    return replace(tied, states=states, ratios={**tied.ratios, **{query: one.ratio for query, one in trained.items()}})


def private_recipe(task: MergeTask) -> Recipe:
    """How one query is trained alone."""
    return task.private_recipe(task.recipe.epochs, seed=2)


def max_private_flops(task: MergeTask) -> float:
    """The FLOPs that training every query alone takes at most."""
    recipe = private_recipe(task)
    queries = task.plan.queries() & task.ctx.queries.keys() or task.ctx.judged
    return task.config.schedules * sum(training_flops(task.ctx, [query], recipe) for query in queries)


def train_schedules(task: MergeTask, models: Mapping[str, nn.Module]) -> Trained:
    """Train what is not frozen of one query's model until its ratio suffices, in as many schedules as still help."""
    query, model = next(iter(models.items()))
    frames = MEASUREMENT.recalibration_frames
    ratio = evaluate_queries(task.ctx, task.checkpoint, Step.BEGUN, models, frames)[query]
    best = Trained(ratio, snapshot(model))
    for number in range(task.config.schedules):
        if best.ratio >= task.required[query] or task.budget.over:
            break
        with task.checkpoint.open_step(Step.SCHEDULE, str(number)) as step:
            if not step.done:
                model.load_state_dict(best.state)
                progress = task.checkpoint.state(Step.BEST)
                progress.setdefault("best", best)
                recipe = replace(task.recipe, seed=task.recipe.seed + 100 * number)
                with suppress(Diverged):
                    for ratios in train_epochs(task.ctx, models, recipe, task.checkpoint, task.budget):
                        if ratios[query] > progress["best"].ratio:
                            progress["best"] = Trained(ratios[query], snapshot(model))
                        if progress["best"].ratio >= task.required[query]:
                            break
                step.value = progress["best"]
        if step.value.ratio <= best.ratio:
            break
        best = step.value
    return best
