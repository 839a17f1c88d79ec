"""One network for all queries of a task, norms and heads private, all trained together.

Of the few networks with the fewest bytes it is the one that comes nearest to answering for all, unchanged. Every query
starts from its weights and learns from its own original. Queries that do not hold keep their originals. FLOPs a second
of the box do not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemel.merger.checkpoint import Step, snapshots
from gemel.merger.init.average import copy_donor_weights
from gemel.merger.methods.joint_training import tie_plan, train_together
from gemel.merger.methods.ladder import NOTHING, MergeCandidate, Search, saved_bytes
from gemel.merger.methods.registry import MergeTask
from gemel.merger.methods.substitute import (
    Networks,
    best_donor,
    network_plan,
    queries_by_task,
    receivers_of,
    smallest_first,
)
from gemel.models.sharing.layers import layers_of


def train_networks(search: Search) -> MergeCandidate:
    """A network for all queries of each task in which that could save more than what holds."""
    joined = NOTHING
    for name, queries in queries_by_task(search.task.ctx).items():
        possible = search.saved_bytes(search.best.leaving(queries)) + network_bytes(search.task, queries)
        if possible > search.saved_bytes(search.best) and not search.task.budget.over:
            with search.task.checkpoint.open_step(Step.TRUNK, name) as step:
                if not step.done:
                    step.value = train_network(search.task, queries)
            served: MergeCandidate = step.value
            joined = replace(joined.join(served), ratios={**joined.ratios, **served.ratios})
    return joined


def train_network(task: MergeTask, queries: list[str]) -> MergeCandidate:
    """One network for these queries, trained, with those that hold."""
    task = replace(task, kin=frozenset())  # kin take part, too
    donor = best_donor(task, smallest_first(task, queries), queries, Networks())
    if donor is None:
        return NOTHING
    receivers = receivers_of(task, donor, queries, Networks())
    ctx = task.ctx.substitute(dict.fromkeys(receivers, donor))
    plan = network_plan(ctx)
    bases = snapshots({query: ctx.bases[query] for query in (donor, *receivers)})
    states = copy_donor_weights(plan, bases, [donor, *receivers])
    own = replace(task, ctx=ctx, plan=plan)
    last, best = train_together(own, tie_plan(own, plan, states))
    holding = max(best, last.holding(task.least), key=lambda one: saved_bytes(task.ctx, one))
    kept = {
        donor,
        *receivers_of(task, donor, sorted(holding.states), Networks()),
    }  # who pays for whose FLOPs may be out
    return replace(
        holding, plan=holding.plan.without(*holding.states.keys() - kept), ratios=last.ratios
    ).drop_unshared()


def network_bytes(task: MergeTask, queries: Sequence[str], donors: Sequence[str] = ()) -> int:
    """The bytes of layers that one network for these queries, or one of these donors', could make unnecessary."""
    task = replace(task, kin=frozenset())
    size = {q: sum(layer.bytes for layer in layers_of(task.ctx.queries[q]) if not layer.head) for q in queries}
    served = [receivers_of(task, donor, queries, Networks()) for donor in (*queries, *donors)]
    return max(sum(size[query] for query in receivers) for receivers in served)
