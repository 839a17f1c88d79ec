"""The default method, top-down: share as much as possible first, then take back what accuracy targets need.

GEMEL adds one group of layers after the other; here all groups are tied at once. Five stages, each of which can be
switched off (merger.config.TopDownConfig):

a. Share tensors that are identical already; queries that share nothing else are settled.
b. Substitution of whole networks is a stage of its own between a and c.
c. Share suffixes of layers without training (merger.methods.suffix).
d. Initialise (merger.init) and train all sharing models together. All sets are tied to the donor's weights (the mean of
   kin). Unrelated models first train against the donor's frozen weights: the donor stays its original, and the others
   learn with their norms, heads and private layers alone. Then all weights train together by distillation from the
   originals, with the features before the heads in the loss. After every epoch the queries at their requirement, and
   what they share without the others, are a candidate. Training stops once all queries are at their requirement.
e. Repair single queries (merger.methods.repair).

Every stage returns a state in which all sharing queries hold, and the result is the one that saves most; so a merge
that is out of time keeps what it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.budget import Budget, measure_training_speed
from merger.checkpoint import Checkpoint, Row, State, Step, snapshots, storable
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import (
    all_met,
    objective,
    queries_at_target,
    required_ratios,
    satisfying_subset,
    tie_and_evaluate,
    training_flops,
)
from merger.events import Event, TrainingKind
from merger.init.average import set_donor
from merger.init.start import Start, prepare_start
from merger.methods.epochs import freeze_shared, train_epochs
from merger.methods.registry import MergeTask, register_method
from merger.methods.repair import REPAIRING, max_repair_flops, repair_queries
from merger.methods.suffix import SHARING_SUFFIXES, share_suffixes
from merger.outcomes import SetTrial, explain_joint
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.groups import groups
from models.sharing.layers import model_bytes
from models.sharing.plan import SharingPlan, tie
from models.sharing.similarity import add_identical, cosine_likeness, identical_sets, queries_identical

TRAINING = "training the models that share"


@dataclass(frozen=True)
class Identical:
    """Stage a: the plan of identical tensors, and the queries that it settles."""

    plan: SharingPlan
    settled: frozenset[str]


@storable
@dataclass(frozen=True)
class JointState:
    """All models tied under a plan, their ratios on val, and the best state found so far that holds."""

    merged: Merged
    ratios: Mapping[str, float]
    best: Merged
    trained: bool = False


def explain_top_down(ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
    """How each set of the whole plan was tried; sets of settled queries needed no training."""
    settled = {query for row in log for query in row.get("identical", ())}
    sets = whole_plan(ctx, options).shared
    as_they_are = [members for members in sets if members[0][0] in settled]
    others = [members for members in sets if members[0][0] not in settled]
    return [*map(SetTrial, as_they_are), *explain_joint(others, log, required_ratios(ctx, options.margin), flops)]


@register_method("top-down", explain_top_down)
def top_down(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Run the five stages; queries that share nothing keep their originals."""
    whole = ctx.run_on_rank0(partial(whole_plan, ctx, options))
    originals = snapshots(ctx.originals)
    identical = share_identical(ctx, whole, originals, options, checkpoint)
    plan = whole.without(*identical.settled)
    merged = Merged(SharingPlan(), {})
    if not whole.shared and len(ctx.judged) > 1:
        ctx.warn("no two models have a layer in common that saves enough")
    if plan.shared:
        merged = merge_different(ctx, plan, options, checkpoint)
    unshared = ctx.queries.keys() - merged.plan.queries()
    result = add_identical(merged.plan, identical.plan, unshared)
    if result.saved_bytes(ctx.layers) < identical.plan.saved_bytes(ctx.layers):
        return Merged(identical.plan, originals)
    return Merged(result, {query: merged.states.get(query, state) for query, state in originals.items()})


def whole_plan(ctx: MergeContext, options: MergeOptions) -> SharingPlan:
    """Every group that saves enough; layers that repeat within models are paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in ctx.originals.items()})
    found = groups(ctx.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


def share_identical(
    ctx: MergeContext, whole: SharingPlan, originals: Mapping[str, State], options: MergeOptions, checkpoint: Checkpoint
) -> Identical:
    """Stage a: split every set into members with equal weights; sharing these changes no model."""
    if not options.top_down.share_identical:
        return Identical(SharingPlan(), frozenset())
    plan = identical_sets(whole, originals)
    settled = frozenset(queries_identical(whole, plan))
    if plan.shared:
        saved = plan.saved_bytes(ctx.layers)
        ctx.report(Event.IDENTICAL, sets=len(plan.shared), saved_bytes=saved, queries=sorted(settled))
        checkpoint.add_row({"identical": sorted(settled), "saved_bytes": saved, "flops": ctx.flops.total})
    return Identical(plan, settled)


def merge_different(ctx: MergeContext, plan: SharingPlan, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Stages c to e for the queries whose weights differ: what saves most with every sharing query at its target."""
    task, config = prepare_task(ctx, plan, options, checkpoint), options.top_down
    ctx.stages.announce([SHARING_SUFFIXES, TRAINING, REPAIRING])
    ctx.begin(SHARING_SUFFIXES)
    early = task.with_budget(task.budget.fraction(config.joint_budget))
    start = ctx.run_on_rank0(lambda: prepare_start(ctx, plan, checkpoint, config))
    best = Merged(SharingPlan(), {})
    if config.share_suffixes:
        untrained = early.with_budget(early.budget.fraction(config.suffix_budget))
        donor = Merged(SharingPlan(), {start.donors[0]: start.states[start.donors[0]]})
        best = share_suffixes(untrained, start, donor, start.donors[1:], Step.SUFFIX)
    whole = task.saved_bytes(best.plan) == task.saved_bytes(plan)
    if whole or checkpoint.step(Step.TRAINING_TIME, lambda: early.budget.over):
        if not whole:
            task.report_time_over(TRAINING, plan, best.plan)
        return best.without(())
    ctx.begin(TRAINING, flops=max_training_flops(early))
    trained, hard = tie_untrained(early, start)
    kinds = [TrainingKind.DONOR_FROZEN] * (config.freeze_donor_first and not start.kin)
    for kind in [*kinds, *[TrainingKind.JOINT] * config.train_jointly]:
        trained = train_kind(early, kind, trained, start, hard)
    best = max(best, trained.best, key=lambda one: task.saved_bytes(one.plan))
    below = [query for query, ratio in trained.ratios.items() if ratio < task.required[query]]
    ctx.begin(REPAIRING, flops=max_repair_flops(task, below))
    if config.repair and (trained.trained or not below):
        repaired = repair_queries(task, trained.merged, trained.ratios)
    else:
        repaired = trained.merged.without(below)
    if config.share_suffixes and trained.trained and repaired.plan.shared:
        left = [query for query in start.donors if query not in repaired.plan.queries()]
        repaired = share_suffixes(task, start, repaired, left, Step.SUFFIX_AFTER_REPAIRS)
    if task.saved_bytes(repaired.plan) >= task.saved_bytes(best.plan):
        return repaired.without(())
    row = {"accepted_bytes": task.saved_bytes(best.plan), "instead_of_bytes": task.saved_bytes(repaired.plan)}
    task.report(Event.RESTORE, **row)
    return best.without(())


def prepare_task(ctx: MergeContext, plan: SharingPlan, options: MergeOptions, checkpoint: Checkpoint) -> MergeTask:
    """The task of stages c to e: training speed is measured if time is limited."""
    recipe, config = replace(options.recipe, seed=ctx.seed), options.top_down
    budget = Budget.of(ctx, options, checkpoint)
    fields = {"rate": recipe.rate, "epochs": recipe.epochs, "private": recipe.private}
    features = recipe.features or config.feature_weight
    checkpoint.add_row({"recipe": {**recipe.__dict__, "features": features}, "flops": ctx.flops.total})
    ctx.report(Event.RECIPE, **fields, features=features)
    if math.isfinite(budget.ends):
        speed = checkpoint.step(Step.SPEED, partial(measure_training_speed, ctx, plan, recipe))
        budget = replace(budget, speed=speed)
    return MergeTask(ctx, plan, recipe, required_ratios(ctx, options.margin), budget, checkpoint, config)


def tie_untrained(task: MergeTask, start: Start) -> tuple[JointState, bool]:
    """All sets tied at their initial weights and evaluated, and whether the merge is hard: then early layers stay
    private."""
    found = task.checkpoint.step(Step.TIED_UNTRAINED, partial(_tie, task, start, task.plan))
    hard = objective(found.ratios, task.required) < task.config.hard_start
    if hard:
        early = early_layers(task)
        tie_rest = partial(_tie, task, start, plan_without(task.plan, early))
        found = task.checkpoint.step(Step.TIED_WITHOUT_EARLY_LAYERS, tie_rest)
        task.checkpoint.add_row({"private_layers": early, "flops": task.ctx.flops.total})
    return found, hard


def train_kind(task: MergeTask, kind: TrainingKind, found: JointState, start: Start, hard: bool) -> JointState:
    """One training, unless all queries hold or not even one epoch fits the budget."""
    ctx, cache, plan = task.ctx, task.checkpoint, found.merged.plan
    frozen = kind is TrainingKind.DONOR_FROZEN
    intact = intact_queries(plan, start) if frozen else set[str]()
    queries = [query for query in sorted(found.ratios) if query not in intact]
    if not queries or all_met(found.ratios, task.required):
        return found
    fit = partial(task.fit_recipe, queries, training_recipe(task, kind, hard), task.recipe.frames_per_epoch)
    recipe = cache.step(Step.RECIPE, fit, kind.value)
    if recipe is None:
        task.report_time_over(f"{TRAINING} ({kind.value})", plan, found.best.plan)
        return found
    with cache.open_step(Step.TRAINED, kind.value) as step:
        if not step.done:
            models = ctx.models(queries, found.merged.states)
            tie(models, plan)
            if frozen:
                freeze_shared(models, plan)
            progress = cache.state(Step.PROGRESS)
            if not progress:
                progress.update(state=found, rows=[])
            try:
                for trained in train_epochs(ctx, models, recipe, cache):
                    ratios = {**found.ratios, **trained}
                    merged = Merged(plan, {**found.merged.states, **snapshots(models)})
                    state, row = _after_epoch(task, progress["state"], merged, ratios)
                    row = {"training": kind.value, "epoch": len(progress["rows"]) + 1, **row, "flops": ctx.flops.total}
                    ctx.report(Event.ROUND, **row)
                    progress.update(state=state, rows=[*progress["rows"], row])
                    if all_met(ratios, task.required) or task.budget.over:
                        break
            except Diverged as error:
                ctx.warn(f"the training diverged at {error}; the state before it stays")
            cache.log.extend(progress["rows"])
            step.value = progress["state"]
    return step.value


def training_recipe(task: MergeTask, kind: TrainingKind, hard: bool) -> Recipe:
    """How the queries are trained; a hard merge takes more epochs."""
    config, recipe = task.config, task.recipe
    features = recipe.features or config.feature_weight
    if kind is TrainingKind.JOINT:
        return replace(recipe, epochs=recipe.epochs * (config.hard_epochs if hard else 1), features=features)
    return replace(
        recipe, epochs=config.frozen_epochs, frames_per_epoch=config.frozen_frames * recipe.frames_per_epoch,
        features=features, norms=config.norm_learning_rate / recipe.rate, private=1.0, seed=recipe.seed + 1,
    )  # fmt: skip


def max_training_flops(task: MergeTask) -> float:
    """FLOPs of a whole hard joint training, within the budget."""
    queries = sorted(task.plan.queries())
    flops = sum(training_flops(task.ctx, queries, training_recipe(task, kind, True)) for kind in TrainingKind)
    return min(flops, task.budget.flops_left)


def early_layers(task: MergeTask) -> dict[str, list[str]]:
    """Query -> its first shareable layers, a small fraction of its shareable bytes; never all that a query shares."""
    found = dict[str, list[str]]()
    for query in sorted(task.plan.queries()):
        mine = {path for members in task.plan.shared for name, path in members if name == query}
        layers = [layer for layer in task.ctx.layers if layer.query == query and layer.path in mine]
        left = task.config.early_fraction * sum(layer.bytes for layer in layers)
        found[query] = []
        for layer in layers:
            left -= layer.bytes
            if left < 0:
                break
            found[query].append(layer.path)
    lost = task.plan.queries() - plan_without(task.plan, found).queries()
    needed = {member for members in task.plan.shared if lost & dict(members).keys() for member in members}
    return {query: [path for path in paths if (query, path) not in needed] for query, paths in found.items()}


def plan_without(plan: SharingPlan, private: Mapping[str, Sequence[str]]) -> SharingPlan:
    """The plan with these layers of each query private."""
    for query, paths in private.items():
        plan = plan.with_private(query, paths)
    return plan


def intact_queries(plan: SharingPlan, start: Start) -> set[str]:
    """The queries that give the weight of every set they are in."""
    foreign = {query for members in plan.shared for query, _ in members if query != set_donor(members, start.donors)[0]}
    return plan.queries() - foreign


def _tie(task: MergeTask, start: Start, plan: SharingPlan) -> JointState:
    queries, states = sorted(plan.queries()), start.initialise(plan)
    models, ratios = tie_and_evaluate(task.ctx, task.checkpoint, plan, queries, states)
    states = snapshots(models)
    best = satisfying_subset(plan, states, ratios, task.required)
    hard = objective(ratios, task.required) < task.config.hard_start
    task.report(Event.START, ratios=ratios, hard=hard, saved_bytes=task.saved_bytes(best.plan))
    return JointState(Merged(plan, states), ratios, best)


def _after_epoch(
    task: MergeTask, state: JointState, merged: Merged, ratios: Mapping[str, float]
) -> tuple[JointState, Row]:
    """The state with this epoch's candidate, if it is better, and the log row of the epoch."""
    candidate = satisfying_subset(merged.plan, merged.states, ratios, task.required)
    saved = task.saved_bytes(candidate.plan)
    best = candidate if saved > task.saved_bytes(state.best.plan) else state.best
    if not state.trained or objective(ratios, task.required) >= objective(state.ratios, task.required):
        state = JointState(merged, ratios, best, True)
    else:
        state = replace(state, best=best)
    return state, {"ratios": dict(ratios), "met": queries_at_target(ratios, task.required), "saved_bytes": saved}
