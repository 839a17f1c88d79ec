"""Stage d of the method top-down: repair single queries below their requirement while shared weights stay frozen.

Norms, head and private layers of the query are trained alone; if that is not enough its original is restored, unshared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from merger.checkpoint import State, Step, StepCache, snapshot, storable
from merger.config import MEASUREMENT
from merger.context import Merged
from merger.evaluate import evaluate_queries, queries_at_target, training_flops
from merger.events import Event, Repair
from merger.methods.epochs import freeze_shared, train_epochs
from merger.methods.registry import MergeTask
from merger.training.loop import Diverged
from merger.training.recipe import Recipe

REPAIRING = "repairing single queries"


@storable
@dataclass(frozen=True)
class Repaired:
    """One query after its repair: its best ratio on val, its state there, trained epochs, and whether it may stay."""

    ratio: float
    state: State
    epochs: int = 0
    holds: bool = False


def repair_queries(task: MergeTask, merged: Merged, ratios: Mapping[str, float]) -> Merged:
    """What is merged once every query holds, or is left to the part of val that accepts, or has its original back.

    Each query below its requirement, or unconfirmed (`MergeContext.confirms`), is repaired on its own, with an equal
    share of the FLOPs left, so the result does not depend on their order.
    """
    ctx, cache = task.ctx, task.checkpoint
    confirmed = confirmed_queries(task, merged, queries_at_target(ratios, task.required))
    below = sorted((query for query in ratios if query not in confirmed), key=lambda query: ratios[query])
    if not below:
        return merged
    over = cache.step(Step.REPAIR_TIME, lambda: task.budget.over)
    found = dict[str, Repaired]()
    if over:
        task.report_time_over(REPAIRING, task.saved_bytes(merged.plan), task.saved_bytes(merged.plan.without(*below)))
    else:
        take_budget, recipe = task.budget.divide(len(below)), repair_recipe(task)

        def repair(own: StepCache, query: str) -> Repaired:
            alone = replace(task, recipe=recipe, budget=take_budget(), checkpoint=own)
            models = ctx.models([query], {query: merged.states[query]})
            freeze_shared(models, merged.plan)
            return train_unfrozen(alone, models)

        found = ctx.for_each_query(cache, Step.REPAIRS, below, repair)
    lost = list[str]()
    for query in below:
        required, ratio = task.required[query], found[query].ratio if query in found else ratios[query]
        if query in found:
            task.report(Event.REPAIR, query=query, repair=Repair.NORMS_AND_HEAD.value, ratio=ratio,
                        required=required, epochs=found[query].epochs)  # fmt: skip
        if not found[query].holds if query in found else ratio < ctx.least_ratio(query, required):
            task.report(Event.REPAIR, query=query, repair=Repair.ORIGINAL.value, ratio=ratio, required=required)
            lost.append(query)
    states = {**merged.states, **{query: one.state for query, one in found.items()}}
    return replace(merged, states=states).without(lost)


def confirmed_queries(task: MergeTask, merged: Merged, queries: Iterable[str], *parts: str) -> set[str]:
    """The queries, of those that hold, that do not do so by luck (`MergeContext.confirms`)."""
    ctx = task.ctx
    if not ctx.accept_unproven:
        return set(queries)

    def confirm(_: StepCache, query: str) -> bool:
        return ctx.confirms(query, ctx.models([query], merged.states)[query])

    found = ctx.for_each_query(task.checkpoint, Step.CONFIRMED, sorted(queries), confirm, *parts)
    return {query for query, is_confirmed in found.items() if is_confirmed}


def repair_recipe(task: MergeTask) -> Recipe:
    """How one query is trained alone."""
    return task.private_recipe(max(1, task.recipe.epochs // 2), seed=2)


def max_repair_flops(task: MergeTask) -> float:
    """The FLOPs that a repair of every query takes at most."""
    recipe = repair_recipe(task)
    return sum(training_flops(task.ctx, [query], recipe) for query in task.plan.queries() or task.ctx.judged)


def train_unfrozen(task: MergeTask, models: Mapping[str, nn.Module]) -> Repaired:
    """Train what is not frozen of one query's model until the query holds, confirmed; nothing if recalibrated norms
    suffice."""
    ctx, cache, (query, model) = task.ctx, task.checkpoint, next(iter(models.items()))
    best = cache.state(Step.BEST)
    if not best:
        frames = MEASUREMENT.recalibration_frames
        ratio = evaluate_queries(ctx, cache, Step.BEGUN, models, frames)[query]
        holds = ratio >= task.required[query] and ctx.confirms(query, model)
        best.update(ratio=ratio, state=snapshot(model), epochs=0, holds=holds)
    epochs = train_epochs(ctx, models, task.recipe, cache)
    with suppress(Diverged):
        while not best["holds"] and not task.budget.over:
            if (ratios := next(epochs, None)) is None:
                break
            best["epochs"] += 1
            holds = ratios[query] >= task.required[query] and ctx.confirms(query, model)
            if holds or ratios[query] > best["ratio"]:
                best.update(ratio=ratios[query], state=snapshot(model), holds=holds)
    holds = best["holds"]
    if not holds and best["ratio"] >= ctx.least_ratio(query, task.required[query]):
        model.load_state_dict(best["state"])
        holds = ctx.confirms(query, model)
    return Repaired(best["ratio"], best["state"], best["epochs"], holds)
