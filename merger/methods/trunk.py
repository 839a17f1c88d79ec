"""The method `trunk`, part of stage c of `top-down`: one network for all queries of a task, norms and heads private.

The network is found as in `substitute`: of the few with the fewest bytes the one that comes nearest to answering for
all, unchanged. Every query starts from its weights and learns from its own original: first with norms and head alone,
while the network stays frozen, then all together. Queries that miss their target are repaired, or keep their originals.
FLOPs a second of the box do not grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from merger.budget import Budget
from merger.checkpoint import Checkpoint, Row, Step, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios
from merger.init.start import Start
from merger.methods.joint_training import Untrained, max_training_flops, tie_untrained, train_together
from merger.methods.registry import MergeTask, prepare_task, register_method
from merger.methods.substitute import Networks, best_donor, network_plan, queries_by_task, receivers_of, smallest_first
from merger.outcomes import SetTrial, explain_joint
from models.sharing.layers import layers_of, model_bytes
from models.sharing.plan import SharingPlan

TRAINING_TRUNK = "training one network for all"


@dataclass(frozen=True, eq=False)  # tensors have no truth value
class Trunk:
    """One network, the donor's, for the queries of a task: what trains it, its start, and the result of that start."""

    donor: str
    receivers: Sequence[str]
    task: MergeTask
    start: Start
    untrained: Untrained


def explain_trunk(ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
    """How each layer of a network for several queries was tried."""
    return explain_joint(network_plan(ctx).shared, log, required_ratios(ctx, options.margin), flops)


@register_method("trunk", explain_trunk)
def trunk(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """One network for all queries of a task; those that it cannot answer for keep their originals."""
    task = prepare_task(ctx, SharingPlan(), options, checkpoint)
    ctx.stages.announce([TRAINING_TRUNK])
    ctx.begin(TRAINING_TRUNK, flops=max_training_flops(task))
    return train_trunks(find_trunks(task, Networks(), queries_by_task(ctx)), task.budget).complete(ctx)


def find_trunks(task: MergeTask, known: Networks, tasks: Iterable[str]) -> list[Trunk]:
    """The network that comes nearest to answering for the queries of a task, for each of these, evaluated untrained.

    Queries that the same network answers already, as in `known`, start as they are there. Kin take part, too.
    """
    ctx, found, task = task.ctx, list[Trunk](), replace(task, kin=frozenset())
    config = replace(task.config, hard_private=0.0)
    by_task = queries_by_task(ctx)
    for queries in (by_task[name] for name in tasks):
        candidates = smallest_first(ctx, queries)[: task.config.network_candidates]
        donor = best_donor(task, candidates, queries, Networks())
        if donor is None or task.budget.over:
            continue
        receivers = receivers_of(task, donor, queries, Networks())
        states = {query: state for query, state in known.states.items() if known.donors[query] == donor}
        served = ctx.substitute(dict.fromkeys(receivers, donor), states)
        own = replace(task, ctx=served, plan=network_plan(served), config=config)
        start = Start((donor, *receivers), snapshots({query: served.bases[query] for query in (donor, *receivers)}))
        untrained = task.checkpoint.step(Step.TRUNK_START, partial(tie_untrained, own, start), donor)
        found.append(Trunk(donor, receivers, own, start, untrained))
    return found


def train_trunks(trunks: Iterable[Trunk], budget: Budget, known: Merged | None = None) -> Merged:
    """What these networks answer for once they are trained, beside what is `known` of other tasks."""
    found = known or Merged(SharingPlan(), {})
    for one in trunks:
        task = one.task.with_budget(budget)
        with task.checkpoint.open_step(Step.TRUNK, one.donor) as step:
            if not step.done and not budget.over:
                early = task.with_budget(budget.fraction(task.config.joint_budget))
                step.value = train_together(task, early, one.start, one.untrained).without(())
        best: Merged = step.value or Merged(SharingPlan(), {})
        root = replace(task, ctx=task.ctx.root)
        kept = {one.donor, *receivers_of(root, one.donor, sorted(best.states), Networks())}
        best = best.without(best.states.keys() - kept)
        networks = {query: one.donor for query in one.receivers if query in best.states}
        plan = SharingPlan(found.plan.shared + best.plan.shared)
        found = Merged(plan, {**found.states, **best.states}, {**found.networks, **networks})
    return found


def saved_bytes(ctx: MergeContext, merged: Merged) -> int:
    """Bytes of the originals that a state makes unnecessary."""
    found = ctx.substitute(merged.networks)
    replaced = sum(model_bytes(ctx.root.queries[one]) - model_bytes(found.queries[one]) for one in merged.networks)
    return replaced + merged.plan.saved_bytes(found.layers)


def possible_bytes(task: MergeTask) -> dict[str, int]:
    """Task -> the bytes of layers that one network for its queries could make unnecessary."""
    ctx, found, task = task.ctx, dict[str, int](), replace(task, kin=frozenset())
    size = {q: sum(layer.bytes for layer in layers_of(ctx.queries[q]) if not layer.head) for q in ctx.judged}
    for name, queries in queries_by_task(ctx).items():
        served = [receivers_of(task, donor, queries, Networks()) for donor in queries]
        found[name] = max(sum(size[query] for query in receivers) for receivers in served)
    return found
