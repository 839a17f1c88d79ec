"""The default method, top-down: share as much as possible first, then take back what accuracy targets need.

GEMEL adds one group of layers after the other; here all groups are tied at once. Five stages, each of which can be
switched off (merger.config.TopDownConfig):

a. Share tensors that are identical already; queries that share nothing else are settled.
b. Let one query's network answer for others (merger.methods.substitute).
c. Initialise (merger.init) and train together (merger.methods.joint_training). Where one network for all queries of a
   task could save more than their layers, and comes near to answering for all untrained, it is trained first
   (merger.methods.trunk). Else all sets are tied to the donor's weights, and a network that starts far off is trained
   last, if it could still save more.
d. Repair single queries (merger.methods.repair).
e. Where some query fell out, and the heavier half of the bytes could save more than what is left: c and d once more,
   with the lighter half private.

Every stage returns a state in which all sharing queries hold, and the result is the one that saves most; so a merge
that is out of time keeps what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.checkpoint import Checkpoint, Row, Step, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios
from merger.events import Event
from merger.init.average import kin_pairs
from merger.init.start import prepare_start
from merger.methods.joint_training import (
    TRAINING,
    describe_reach,
    light_layers,
    max_training_flops,
    plan_without,
    train_together,
)
from merger.methods.registry import MergeTask, prepare_task, register_method
from merger.methods.substitute import SUBSTITUTING, Networks, find_networks, task_names
from merger.methods.trunk import TRAINING_TRUNK, Trunks, possible_bytes, saved_bytes, share_trunks
from merger.outcomes import SetTrial, explain_joint
from models.notes import add_note
from models.sharing.groups import groups
from models.sharing.layers import model_bytes
from models.sharing.plan import SharingPlan
from models.sharing.similarity import add_identical, cosine_likeness, identical_sets, queries_identical

TRAINING_HALF = "training with half of the bytes shared"
TRAINING_FAR_TRUNK = "training one network that starts far from the targets"


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
    whole, config = ctx.run_on_rank0(partial(whole_plan, ctx, options)), options.top_down
    states = {query: ctx.bases[query].state_dict() for query in ctx.judged}
    kin = ctx.run_on_rank0(partial(kin_pairs, ctx.layers, states, config.kin_similarity))
    task = replace(prepare_task(ctx, whole, options, checkpoint), kin=kin)
    ctx.stages.announce([SUBSTITUTING, TRAINING_TRUNK, TRAINING, TRAINING_HALF, TRAINING_FAR_TRUNK])
    ctx.begin(SUBSTITUTING, pieces=len(ctx.judged))
    if reach := describe_reach(task):
        add_note("the budget", reach)
    early = task.with_budget(task.budget.fraction(config.joint_budget))
    known = Networks()
    if config.substitute:
        known = find_networks(early.with_budget(early.budget.fraction(config.network_budget)))
    substituted = ctx.substitute(known.donors, known.states)
    whole = ctx.run_on_rank0(partial(whole_plan, substituted, options)) if known.donors else whole
    layers_save = saved_bytes(ctx, Merged(whole, {}, known.donors))
    trunks, trunks_save = Trunks(), possible_bytes(task) if config.share_trunk else 0
    if trunks_save > layers_save:
        ctx.begin(TRAINING_TRUNK, flops=max_training_flops(early))
        trunks = share_trunks(early, known, task_names(ctx), near_only=True)
        if saved_bytes(ctx, trunks.merged) >= layers_save:
            return trunks.merged.complete(ctx)
    if not whole.shared and len(ctx.judged) > 1:
        ctx.warn("no two models have a layer in common that saves enough")
    task = replace(task, ctx=substituted, plan=whole)
    identical = share_identical(task, options)
    merged = merge_different(replace(task, plan=whole.without(*identical.settled)))
    best = max(merged_with(identical, merged, substituted), trunks.merged.complete(ctx), key=partial(saved_bytes, ctx))
    if not trunks.far or saved_bytes(ctx, best) >= trunks_save:
        return best
    if checkpoint.step(Step.TRUNK_TIME, lambda: task.budget.over):
        task.report_time_over(TRAINING_FAR_TRUNK, trunks_save, saved_bytes(ctx, best))
        return best
    ctx.begin(TRAINING_FAR_TRUNK, flops=max_training_flops(task))
    far = share_trunks(replace(task, ctx=ctx, plan=SharingPlan()), known, trunks.far, found=trunks.merged)
    return max(best, far.merged.complete(ctx), key=partial(saved_bytes, ctx))


def merged_with(identical: Identical, merged: Merged, ctx: MergeContext) -> Merged:
    """A merge with the identical tensors of the queries that it leaves alone, or those alone, if they save more."""
    bases, unshared = snapshots(ctx.bases), ctx.queries.keys() - merged.plan.queries()
    result = add_identical(merged.plan, identical.plan, unshared)
    if result.saved_bytes(ctx.layers) < identical.plan.saved_bytes(ctx.layers):
        return Merged(identical.plan, bases, ctx.networks)
    return Merged(result, {query: merged.states.get(query, state) for query, state in bases.items()}, ctx.networks)


def whole_plan(ctx: MergeContext, options: MergeOptions) -> SharingPlan:
    """Every group that saves enough; layers that repeat within models are paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    likeness = cosine_likeness({query: model.state_dict() for query, model in ctx.bases.items()})
    found = groups(ctx.layers, "wide", likeness=likeness)
    return SharingPlan.of(group for group in found if group.saved_bytes >= options.min_saving * total)


def share_identical(task: MergeTask, options: MergeOptions) -> Identical:
    """Stage a: split every set into members with equal weights; sharing these changes no model."""
    ctx, whole = task.ctx, task.plan
    if not options.top_down.share_identical:
        return Identical(SharingPlan(), frozenset())
    plan = identical_sets(whole, snapshots(ctx.bases))
    settled = frozenset(queries_identical(whole, plan))
    if plan.shared:
        saved = task.saved_bytes(plan)
        ctx.report(Event.IDENTICAL, sets=len(plan.shared), saved_bytes=saved, queries=sorted(settled))
        task.checkpoint.add_row({"identical": sorted(settled), "saved_bytes": saved, "flops": ctx.flops.total})
    return Identical(plan, settled)


def merge_different(task: MergeTask) -> Merged:
    """Stages c to e for the queries whose weights differ: what saves most with every sharing query at its target."""
    ctx, plan, checkpoint, config = task.ctx, task.plan, task.checkpoint, task.config
    if not plan.shared:
        return Merged(SharingPlan(), {})
    ctx.begin(TRAINING, flops=max_training_flops(task))
    early = task.with_budget(task.budget.fraction(config.joint_budget))
    if checkpoint.step(Step.TRAINING_TIME, lambda: early.budget.over):
        task.report_time_over(TRAINING, task.saved_bytes(plan), 0)
        return Merged(SharingPlan(), {})
    start = ctx.run_on_rank0(lambda: prepare_start(ctx, plan, config))
    best = train_together(task, early, start)
    heavier = plan_without(plan, light_layers(task, config.half_private))
    if config.share_half and task.saved_bytes(heavier) > task.saved_bytes(best.plan):
        if checkpoint.step(Step.HALF_TIME, lambda: early.budget.over):
            task.report_time_over(TRAINING_HALF, task.saved_bytes(heavier), task.saved_bytes(best.plan))
            return best.without(())
        ctx.begin(TRAINING_HALF, flops=max_training_flops(task))
        half = replace(config, hard_start=1.0, hard_private=config.half_private, kin_private=config.half_private)
        with checkpoint.open_step(Step.HALF) as step:
            if not step.done:
                step.value = train_together(replace(task, config=half), replace(early, config=half), start)
        best = max(best, step.value, key=lambda one: task.saved_bytes(one.plan))
    return best.without(())
