"""The default method, top-down: share as much as possible first, then take back what accuracy targets need.

GEMEL adds one group of layers after the other; here all groups are tied at once. Five stages, each of which can be
switched off (merger.config.TopDownConfig):

a. Share tensors that are identical already; queries that share nothing else are settled.
b. Let one query's network answer for others (merger.methods.substitute).
c. Initialise (merger.init) and train together (merger.methods.joint_training). One network for all queries of a task
   (merger.methods.trunk), where it could save more than their layers, and shared layers are both evaluated untrained.
   What starts nearer to its targets is trained first, what follows if it could still save more. Queries that a network
   for all does not serve share their layers.
d. Repair single queries (merger.methods.repair).
e. Where the heavier half of the bytes could save more than what is left: c and d once more, with the lighter half
   private; then a quarter, and so on, while that saves more. Rounds that could save no more are left out.

Every stage returns a state in which all sharing queries hold, and the result is the one that saves most; so a merge
that is out of time keeps what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.checkpoint import Checkpoint, Row, Step, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import objective, required_ratios
from merger.events import Event
from merger.init.average import kin_pairs
from merger.init.start import Start, prepare_start
from merger.methods.joint_training import (
    TRAINING,
    Untrained,
    describe_reach,
    light_layers,
    max_training_flops,
    plan_without,
    tie_heavier,
    tie_untrained,
    train_together,
)
from merger.methods.registry import MergeTask, prepare_task, register_method
from merger.methods.substitute import SUBSTITUTING, Networks, find_networks, queries_by_task
from merger.methods.trunk import TRAINING_TRUNK, find_trunks, possible_bytes, saved_bytes, train_trunks
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
    if not whole.shared and len(ctx.judged) > 1:
        ctx.warn("no two models have a layer in common that saves enough")
    layers = replace(task, ctx=substituted, plan=whole)
    identical = share_identical(layers, options)
    return train_nearer_first(task, early, layers, identical, known)


def train_nearer_first(
    task: MergeTask, early: MergeTask, layers: MergeTask, identical: Identical, known: Networks
) -> Merged:
    """Stages c to e: one network for all queries of a task, and the layers.

    What starts nearer to its targets is trained first, within the budget of `early`; what could save no more than what
    holds is left out. Queries that a network for all does not serve share their layers.
    """
    ctx, checkpoint, nothing = task.ctx, task.checkpoint, Merged(SharingPlan(), {})
    joined, saved = partial(join_parts, identical, layers.ctx), partial(saved_bytes, ctx)
    most = layer_bytes(layers, known, ctx.judged)
    tasks, trunks_save = trunk_tasks(layers, known) if task.config.share_trunk else ([], 0)
    layers = replace(layers, plan=layers.plan.without(*identical.settled))
    best = joined(nothing, nothing)
    if checkpoint.step(Step.TRAINING_TIME, lambda: early.budget.over):
        if max(most, trunks_save) > saved(best):
            task.report_time_over(TRAINING, max(most, trunks_save), saved(best))
        return best
    start = choose_start(layers) if layers.plan.shared else None
    trunks = find_trunks(early, known, tasks) if trunks_save > saved(best) else []
    first = [one for one in trunks if is_nearer(one.untrained, start and start[1], layers.required)]
    last, served, rest, merged = [one for one in trunks if one not in first], nothing, nothing, nothing
    if first:
        ctx.begin(TRAINING_TRUNK, flops=max_training_flops(early))
        served = train_trunks(first, early.budget)
        rest = share_rest(layers, served)
        best = max(best, joined(served, rest), key=saved)
    if start and saved(best) < most:
        merged = merge_different(layers, *start)
        best = max(best, joined(nothing, merged), key=saved)
    if not last or saved(best) >= trunks_save:
        return best
    if checkpoint.step(Step.TRUNK_TIME, lambda: task.budget.over):
        task.report_time_over(TRAINING_FAR_TRUNK, trunks_save, saved(best))
        return best
    ctx.begin(TRAINING_FAR_TRUNK, flops=max_training_flops(task))
    served = train_trunks(last, task.budget, served)
    return max(best, joined(served, rest), joined(served, merged), key=saved)


def layer_bytes(layers: MergeTask, known: Networks, queries: Collection[str]) -> int:
    """Bytes that these queries' layers could save among themselves, with the networks known."""
    donors = {query: donor for query, donor in known.donors.items() if query in queries}
    plan = layers.plan.without(*(query for query in layers.ctx.judged if query not in queries))
    return saved_bytes(layers.ctx.root, Merged(plan, {}, donors))


def trunk_tasks(layers: MergeTask, known: Networks) -> tuple[list[str], int]:
    """The tasks in which one network for all queries could save more than their layers; the bytes it could save, and
    those that the layers of the other queries could.

    In a task whose models are of one architecture it could not.
    """
    ctx, found, most = layers.ctx.root, list[str](), 0
    left = set(ctx.judged)
    possible = possible_bytes(replace(layers, ctx=ctx))
    for name, queries in queries_by_task(ctx).items():
        if possible[name] > layer_bytes(layers, known, queries):
            found.append(name)
            most += possible[name]
            left -= set(queries)
    return found, most + layer_bytes(layers, known, left) if found else 0


def share_rest(layers: MergeTask, trunks: Merged) -> Merged:
    """The layers of the queries that these networks do not serve, trained; nothing if they serve none or all."""
    rest = replace(layers, plan=layers.plan.without(*trunks.states))
    if not trunks.states or not rest.plan.shared:
        return Merged(SharingPlan(), {})
    with layers.checkpoint.open_step(Step.REST) as step:
        if not step.done:
            step.value = merge_different(rest, *choose_start(rest))
    return step.value


def choose_start(task: MergeTask) -> tuple[Start, Untrained]:
    """The layers' initial weights, a donor's or between fine-tunes of one network their mean, whichever is nearer."""
    start = task.ctx.run_on_rank0(lambda: prepare_start(task.ctx, task.plan, task.config))
    starts = {"donor": replace(start, averages=False), **({"mean": start} if start.averages else {})}
    found = [
        (one, task.checkpoint.step(Step.LAYERS_START, partial(tie_untrained, task, one), name))
        for name, one in starts.items()
    ]
    return max(found, key=lambda one: objective(one[1][0].ratios, task.required))


def is_nearer(trunk: Untrained, layers: Untrained | None, required: Mapping[str, float]) -> bool:
    """Whether a network for all starts nearer to the targets of its queries than their shared layers do."""
    own, others = trunk[0].ratios, layers[0].ratios if layers else {}
    both = own.keys() & others.keys()
    nearness = [objective({query: ratios[query] for query in both}, required) for ratios in (own, others)]
    return not both or nearness[0] > nearness[1]


def join_parts(identical: Identical, ctx: MergeContext, trunks: Merged, layers: Merged) -> Merged:
    """Networks for all, the layers of the queries that they do not serve, identical tensors of those left alone."""
    layers = layers.without(trunks.states)
    plan = SharingPlan(trunks.plan.shared + layers.plan.shared)
    plan = add_identical(plan, identical.plan, ctx.queries.keys() - trunks.states.keys() - layers.states.keys())
    networks = {query: donor for query, donor in ctx.networks.items() if query not in trunks.states}
    return Merged(plan, {**layers.states, **trunks.states}, {**networks, **trunks.networks}).complete(ctx)


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


def merge_different(task: MergeTask, start: Start, untrained: Untrained) -> Merged:
    """Stages c to e for the queries whose weights differ: what saves most with every sharing query at its target."""
    task.ctx.begin(TRAINING, flops=max_training_flops(task))
    early = task.with_budget(task.budget.fraction(task.config.joint_budget))
    best = train_together(task, early, start, untrained)
    if task.config.share_half:
        best = share_in_rounds(task, early, start, best)
    return best.without(())


def share_in_rounds(task: MergeTask, early: MergeTask, start: Start, best: Merged) -> Merged:
    """Stage e: the lighter half of the bytes private, then a quarter, and so on, each from the best state so far.

    A round that could save no more than that state is left out; the first that does not is the last.
    """
    private = 1.0
    while (private := private / 2) >= task.config.hard_private:
        light = light_layers(task, private)
        if not any(light.values()):
            break
        possible, saved = task.saved_bytes(plan_without(task.plan, light)), task.saved_bytes(best.plan)
        if possible <= saved:
            continue
        if task.checkpoint.step(Step.HALF_TIME, lambda: early.budget.over, str(private)):
            task.report_time_over(TRAINING_HALF, possible, saved)
            break
        task.ctx.begin(TRAINING_HALF, flops=max_training_flops(task))
        with task.checkpoint.open_step(Step.HALF, str(private)) as step:
            if not step.done:
                step.value = share_heavier(task, early, replace(start, states={**start.states, **best.states}), private)
        if task.saved_bytes(step.value.plan) <= saved:
            break
        best = step.value
    return best


def share_heavier(task: MergeTask, early: MergeTask, start: Start, private: float) -> Merged:
    """Stages c and d with the lightest layers, this fraction of the bytes, private; some layer is so light."""
    found = tie_heavier(task, start, private)
    assert found is not None
    return train_together(task, early, start, (found, True))
