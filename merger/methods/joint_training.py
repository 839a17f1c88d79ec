"""All layers of a plan tied, and all models that share trained together.

After every epoch the queries that hold, and what they share without the others, are a candidate. Training stops once
all suffice, but of a hard merge it runs to the end of its schedule: there an early epoch suffices by luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gemel.merger.checkpoint import State, Step
from gemel.merger.context import MergeContext
from gemel.merger.evaluate import all_met, objective, tie_and_evaluate, training_flops
from gemel.merger.methods.epochs import freeze_shared, train_epochs
from gemel.merger.methods.ladder import NOTHING, MergeCandidate, saved_bytes
from gemel.merger.methods.private import max_private_flops, train_private
from gemel.merger.methods.registry import MergeTask
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import Recipe
from gemel.models.sharing.plan import SharingPlan


def tie_plan(task: MergeTask, plan: SharingPlan, states: Mapping[str, State]) -> MergeCandidate:
    """All sets of a plan tied at these weights, and evaluated."""
    ctx, queries = task.ctx, sorted(plan.queries() & task.ctx.queries.keys())
    models, ratios = tie_and_evaluate(ctx, task.checkpoint, plan, queries, states)
    networks = {query: ctx.networks[query] for query in queries if query in ctx.networks}
    return MergeCandidate(plan, ctx.snapshots(models), networks, ratios)


def train_together(
    task: MergeTask, tied: MergeCandidate, is_kin: bool = False
) -> tuple[MergeCandidate, MergeCandidate]:
    """All queries of a candidate trained together, then those alone that are still below; and the best that held.

    Both are over all queries of the candidate: the second may be nothing.
    """
    nearest, best = train_jointly(replace(task, budget=task.budget.fraction(task.config.joint_budget)), tied, is_kin)
    return train_private(task, nearest), best


def train_jointly(task: MergeTask, tied: MergeCandidate, is_kin: bool) -> tuple[MergeCandidate, MergeCandidate]:
    """The state that comes nearest to what is required, and that which saves most of those in which queries hold."""
    ctx, cache, plan = task.ctx, task.checkpoint, tied.plan
    if all_met(tied.ratios, task.required):
        return tied, NOTHING
    is_hard = objective(tied.ratios, task.required) < task.config.hard_start
    queries, asked = sorted(tied.ratios), training_recipe(task, is_hard, is_kin)
    fit = partial(task.fit_recipe, queries, asked, task.recipe.frames_per_epoch)
    recipe = cache.step(Step.RECIPE, fit)
    if recipe is None:
        return tied, NOTHING
    with cache.open_step(Step.TRAINED) as step:
        if not step.done:
            models = ctx.spread_models(plan, queries, tied.states)
            freeze_shared(models, lent_plan(ctx, plan))
            progress = cache.state(Step.PROGRESS)
            if not progress:
                progress.update(nearest=tied, best=NOTHING, trained=False)
            try:
                for ratios in train_epochs(ctx, models, recipe, cache, task.budget):
                    trained = replace(tied, states={**tied.states, **ctx.snapshots(models)}, ratios=ratios)
                    _compare(task, progress, trained)
                    if all_met(ratios, task.required) and not is_hard:
                        break
            except Diverged as error:
                ctx.warn(f"the training diverged at {error}; the state before it stays")
            step.value = progress["nearest"], progress["best"]
    return step.value


def _compare(task: MergeTask, progress: dict, trained: MergeCandidate) -> None:
    """Keep a state if it comes nearer, and its queries that hold if they save more."""
    ctx = task.ctx.root
    holding = trained.holding(task.required)
    if saved_bytes(ctx, holding) > saved_bytes(ctx, progress["best"]):
        progress["best"] = holding
    before = objective(progress["nearest"].ratios, task.required)
    if not progress["trained"] or objective(trained.ratios, task.required) >= before:
        progress.update(nearest=trained, trained=True)


def training_recipe(task: MergeTask, is_hard: bool, is_kin: bool = False) -> Recipe:
    """How the queries are trained; a hard merge takes more epochs."""
    config, recipe = task.config, task.recipe
    rate = recipe.rate * (config.kin_rate if is_kin else 1.0)
    return replace(recipe, epochs=recipe.epochs * (config.hard_epochs if is_hard else 1), rate=rate)


def max_training_flops(task: MergeTask) -> float:
    """FLOPs of a whole hard joint training, and of what is trained alone then, within the budget."""
    queries = sorted(task.plan.queries() & task.ctx.queries.keys() or task.ctx.judged)
    flops = training_flops(task.ctx, queries, training_recipe(task, True))
    return min(flops + max_private_flops(task), task.budget.flops_left)


def light_layers(task: MergeTask, fraction: float) -> dict[str, list[str]]:
    """Query -> its lightest shareable layers, this fraction of its shareable bytes; never all that a query shares."""
    light = dict[str, list[str]]()
    for query in sorted(task.plan.queries() & task.ctx.queries.keys()):
        mine = {path for members in task.plan.shared for name, path in members if name == query}
        layers = [layer for layer in task.ctx.layers if layer.query == query and layer.path in mine]
        left = fraction * sum(layer.bytes for layer in layers)
        light[query] = []
        for layer in sorted(layers, key=lambda layer: layer.bytes):
            left -= layer.bytes
            if left < 0:
                break
            light[query].append(layer.path)
    lost = task.plan.queries() - plan_without(task.plan, light).queries()
    needed = {member for members in task.plan.shared if lost & dict(members).keys() for member in members}
    return {query: [path for path in paths if (query, path) not in needed] for query, paths in light.items()}


def lent_plan(ctx: MergeContext, plan: SharingPlan) -> SharingPlan:
    """The sets of a plan whose weight is a donor's of a bundle, which no training changes."""
    donors = ctx.donors.queries.keys()
    return SharingPlan(tuple(members for members in plan.shared if donors & dict(members).keys()))


def plan_without(plan: SharingPlan, private: Mapping[str, Sequence[str]]) -> SharingPlan:
    """The plan with these layers of each query private."""
    for query, paths in private.items():
        plan = plan.with_private(query, paths)
    return plan
