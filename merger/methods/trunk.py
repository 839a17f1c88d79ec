"""The method `trunk`, part of stage c of `top-down`: one network for all queries of a task, norms and heads private.

The network is found as in `substitute`: of the few with the fewest bytes the one that comes nearest to answering for
all, unchanged. Every query starts from its weights and learns from its own original: first with norms and head alone,
while the network stays frozen, then all together. Queries that miss their target are repaired, or keep their originals.
FLOPs a second of the box do not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from merger.checkpoint import Checkpoint, Row, Step, snapshots
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios
from merger.init.start import Start
from merger.methods.joint_training import max_training_flops, tie_untrained, train_together
from merger.methods.registry import MergeTask, prepare_task, register_method
from merger.methods.substitute import Networks, best_donor, network_plan, receivers_of, smallest_first, task_names
from merger.outcomes import SetTrial, explain_joint
from models.sharing.layers import layers_of, model_bytes
from models.sharing.plan import SharingPlan

TRAINING_TRUNK = "training one network for all"


@dataclass(frozen=True)
class Trunks:
    """What networks for all queries of a task save, and the tasks whose network is too far from them to be trained."""

    merged: Merged = field(default_factory=lambda: Merged(SharingPlan(), {}))
    far: tuple[str, ...] = ()


def explain_trunk(ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
    """How each layer of a network for several queries was tried."""
    return explain_joint(network_plan(ctx).shared, log, required_ratios(ctx, options.margin), flops)


@register_method("trunk", explain_trunk)
def trunk(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """One network for all queries of a task; those that it cannot answer for keep their originals."""
    task = prepare_task(ctx, SharingPlan(), options, checkpoint)
    ctx.stages.announce([TRAINING_TRUNK])
    ctx.begin(TRAINING_TRUNK, flops=max_training_flops(task))
    return share_trunks(task, Networks(), task_names(ctx)).merged.complete(ctx)


def share_trunks(
    task: MergeTask, known: Networks, names: Sequence[str], near_only: bool = False, found: Merged | None = None
) -> Trunks:
    """One network for the queries of each of these tasks, and the states of those that it answers for.

    Queries that the same network answers already, as in `known`, start as they are there. With `near_only` a network
    that, untrained, is far from answering for all is not trained. `found` is what other tasks share.
    """
    ctx, found, far = task.ctx, found or Merged(SharingPlan(), {}), list[str]()
    for name in names:
        queries = [query for query in ctx.judged if ctx.queries[query].task == name]
        candidates = smallest_first(ctx, queries)[: task.config.network_candidates]
        donor = best_donor(task, candidates, queries, Networks())
        if donor is None or task.budget.over:
            continue
        with task.checkpoint.open_step(Step.TRUNK, donor, *["near"] * near_only) as step:
            if not step.done:
                receivers = receivers_of(task, donor, queries, Networks())
                step.value = _train_trunk(task, donor, receivers, known, near_only)
        if step.value is None:
            far.append(name)
            continue
        networks, states = {**found.networks, **step.value.networks}, {**found.states, **step.value.states}
        found = Merged(SharingPlan(found.plan.shared + step.value.plan.shared), states, networks)
    return Trunks(found, tuple(far))


def saved_bytes(ctx: MergeContext, merged: Merged) -> int:
    """Bytes of the originals that a state makes unnecessary."""
    found = ctx.substitute(merged.networks)
    replaced = sum(model_bytes(ctx.root.queries[one]) - model_bytes(found.queries[one]) for one in merged.networks)
    return replaced + merged.plan.saved_bytes(found.layers)


def possible_bytes(task: MergeTask) -> int:
    """Bytes that one network for the queries of each task could save at most."""
    ctx, total = task.ctx, 0
    for name in task_names(ctx):
        queries = [query for query in ctx.judged if ctx.queries[query].task == name]
        best = 0
        for donor in queries:
            private = model_bytes(ctx.queries[donor]) - sum(
                layer.bytes for layer in layers_of(ctx.queries[donor]) if not layer.head
            )
            served = receivers_of(task, donor, queries, Networks())
            best = max(best, sum(model_bytes(ctx.queries[query]) - private for query in served))
        total += best
    return total


def _train_trunk(
    task: MergeTask, donor: str, receivers: Sequence[str], known: Networks, near_only: bool
) -> Merged | None:
    """What is shared, and with what states, once the receivers were trained on the donor's network; None if far."""
    states = {query: state for query, state in known.states.items() if known.donors[query] == donor}
    ctx = task.ctx.substitute(dict.fromkeys(receivers, donor), states)
    config = replace(task.config, hard_private=0.0)
    own = replace(task, ctx=ctx, plan=network_plan(ctx), config=config)
    start = Start((donor, *receivers), snapshots({query: ctx.bases[query] for query in (donor, *receivers)}))
    early = own.with_budget(own.budget.fraction(config.joint_budget))
    if near_only and tie_untrained(early, start)[1]:
        return None
    best = train_together(own, early, start).without(())
    served = {query: donor for query in receivers if query in best.states}
    return Merged(best.plan, best.states, served)
