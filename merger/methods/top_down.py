"""The default method, top-down: share as much as possible first, then take back what accuracy targets need.

GEMEL adds one group of layers after the other; here all groups are tied at once. Five stages, each of which can be
switched off (merger.config.TopDownConfig):

a. Share tensors that are identical already; queries that share nothing else are settled.
b. Substitution of whole networks is a stage of its own between a and c.
c. Share suffixes of layers without training (merger.methods.suffix).
d. Initialise and train all sharing models together (merger.init, merger.methods.joint).
e. Repair single queries (merger.methods.repair).

Every stage returns a state in which all sharing queries hold, and the result is the one that saves most; so a merge
that is out of time keeps what it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.budget import training_speed
from merger.checkpoint import Checkpoint, State, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios
from merger.events import Event
from merger.init.start import Start, prepare_start
from merger.methods.joint import TRAINING, JointState, max_training_flops, train_together
from merger.methods.registry import MergeTask, register_method
from merger.methods.repair import REPAIRING, max_repair_flops, merged_without, repair_queries
from merger.methods.suffix import SHARING_SUFFIXES, share_suffixes
from merger.outcomes import Row, SetTrial, explain_joint
from models.sharing.groups import groups
from models.sharing.layers import model_bytes
from models.sharing.plan import SharingPlan
from models.sharing.similarity import add_identical, cosine_likeness, identical_sets, queries_identical


@dataclass(frozen=True)
class Identical:
    """Stage a: the plan of identical tensors, and the queries that it settles."""

    plan: SharingPlan
    settled: frozenset[str]


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
    if not whole.shared:
        ctx.progress(Event.WARNING.value, text="no two models have a layer in common that saves enough")
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
        ctx.progress(Event.IDENTICAL.value, sets=len(plan.shared), saved_bytes=saved, queries=sorted(settled))
        checkpoint.add_row({"identical": sorted(settled), "saved_bytes": saved, "flops": ctx.flops.total})
    return Identical(plan, settled)


def merge_different(ctx: MergeContext, plan: SharingPlan, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Stages c to e for the queries whose weights differ: what saves most with every sharing query at its target."""
    task, config = _task(ctx, plan, options, checkpoint), options.top_down
    ctx.stages.announce([SHARING_SUFFIXES, TRAINING, REPAIRING])
    ctx.begin(SHARING_SUFFIXES)
    early = task.with_budget(task.budget.fraction(config.joint_budget))
    start = ctx.run_on_rank0(lambda: prepare_start(ctx, plan, checkpoint, config))
    best = Merged(SharingPlan(), {})
    if config.share_suffixes:
        untrained = early.with_budget(early.budget.fraction(config.suffix_budget))
        best = share_suffixes(untrained, start, _donor_alone(start), start.donors[1:], "suffix")
    whole = task.saved_bytes(best.plan) == task.saved_bytes(plan)
    if whole or checkpoint.step("time for training", lambda: early.budget.over):
        if not whole:
            task.report_time_over(TRAINING, plan, best.plan)
        return _only_sharing(best)
    ctx.begin(TRAINING, flops=max_training_flops(early))
    trained = train_together(early, start)
    best = max(best, trained.best, key=lambda one: task.saved_bytes(one.plan))
    below = [query for query, ratio in trained.ratios.items() if ratio < task.required[query]]
    ctx.begin(REPAIRING, flops=max_repair_flops(task, below))
    repaired = _repair(task, trained, below)
    if config.share_suffixes and trained.trained and repaired.plan.shared:
        left = [query for query in start.donors if query not in repaired.plan.queries()]
        repaired = share_suffixes(task, start, repaired, left, "suffix after repairs")
    if task.saved_bytes(repaired.plan) >= task.saved_bytes(best.plan):
        return _only_sharing(repaired)
    row = {"accepted_bytes": task.saved_bytes(best.plan), "instead_of_bytes": task.saved_bytes(repaired.plan)}
    task.report(Event.RESTORE, **row)
    return _only_sharing(best)


def _task(ctx: MergeContext, plan: SharingPlan, options: MergeOptions, checkpoint: Checkpoint) -> MergeTask:
    """The task of stages c to e: training speed is measured if time is limited."""
    recipe = replace(options.recipe, seed=ctx.seed)
    task = MergeTask.of(ctx, plan, recipe, options, checkpoint)
    fields = {"rate": recipe.rate, "epochs": recipe.epochs, "private": recipe.private}
    features = recipe.features or task.config.feature_weight
    checkpoint.add_row({"recipe": {**recipe.__dict__, "features": features}, "flops": ctx.flops.total})
    ctx.progress(Event.RECIPE.value, **fields, features=features)
    if math.isfinite(task.budget.ends):
        speed = checkpoint.step("speed", partial(training_speed, ctx, plan, recipe))
        task = task.with_budget(replace(task.budget, speed=speed))
    return task


def _repair(task: MergeTask, trained: JointState, below: Sequence[str]) -> Merged:
    if task.config.repair and (trained.trained or not below):
        return repair_queries(task, trained.merged, trained.ratios)
    return merged_without(trained.merged, below)


def _donor_alone(start: Start) -> Merged:
    return Merged(SharingPlan(), {start.donors[0]: start.states[start.donors[0]]})


def _only_sharing(merged: Merged) -> Merged:
    """The merge with the states of sharing queries alone: others keep their originals, channels in their own order."""
    return Merged(merged.plan, {query: merged.states[query] for query in merged.plan.queries()})
