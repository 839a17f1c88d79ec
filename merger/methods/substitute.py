"""One query's network answers for others.

Of the queries of one task the networks with the fewest bytes are the candidates. The one that, unchanged, comes nearest
to answering for the most bytes is the donor. Each other query takes its network: unchanged, with the outputs of its own
classes, if that is near enough; else with norms and head trained on its own frames
by distillation, while the donor's weights stay frozen. That training runs to the end of its schedule and is evaluated
once: an epoch that looks good on few frames is often luck. The queries that hold are served. The rest goes on
with the next donor, until a few have served none. FLOPs a second of the box do not grow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from torch import nn

from gemel.merger.checkpoint import State, Step, StepCache, snapshot, storable
from gemel.merger.context import MergeContext
from gemel.merger.evaluate import Price
from gemel.merger.events import Change, Event
from gemel.merger.methods.epochs import freeze_shared, train_epochs
from gemel.merger.methods.registry import MergeTask
from gemel.merger.networks import answered_by, can_answer, outputs_of
from gemel.merger.training.loop import Diverged
from gemel.merger.training.recipe import flops_a_second
from gemel.models.sharing.layers import layers_of, model_bytes
from gemel.models.sharing.plan import SharingPlan


@storable
@dataclass(frozen=True)
class NetworkAttempt:
    """How a query came out with another's network: its ratio, and its state where norms and head were trained."""

    ratio: float
    state: State | None = None


@storable
@dataclass(frozen=True)
class Networks:
    """Query -> the query whose network answers it, and the states that are not the donor's."""

    donors: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)


def network_plan(ctx: MergeContext) -> SharingPlan:
    """All layers but the heads of every network that answers several queries."""
    plan = SharingPlan()
    for donor in dict.fromkeys(ctx.networks.values()):
        queries = [donor, *(query for query, its in ctx.networks.items() if its == donor)]
        for layer in layers_of(ctx.query(donor)):
            if not layer.head:
                plan = plan.with_set((query, layer.path) for query in queries)
    return plan


def find_networks(task: MergeTask, known: Networks, trains: bool) -> Networks:
    """Which queries are answered by whose network, so that all of them hold; `trains`: norms and head, too."""
    ctx, found = task.ctx, known
    for name, queries in queries_by_task(ctx).items():
        left = [query for query in queries if query not in known.donors]
        tried, failures = set[str](), 0
        while failures < task.config.network_candidates and not task.budget.over:
            candidates = [*donors_of_task(task, name, left, tried), *smallest_first(task, set(left) - tried)]
            donor = best_donor(task, candidates, left, found)
            if donor is None:
                break
            tried.add(donor)
            served = _serve(task, donor, receivers_of(task, donor, left, found), found, trains)
            failures += not served.donors.keys() - found.donors.keys()
            if len(served.donors) > len(found.donors):
                left = [query for query in left if query != donor and query not in served.donors]
                found = served
                ctx.stages.reach(len(found.donors))
    return found


def smallest_first(task: MergeTask, queries: Iterable[str]) -> list[str]:
    """The few of these queries whose networks have the fewest bytes."""
    ordered = sorted(queries, key=lambda query: (model_bytes(task.ctx.queries[query]), query))
    return ordered[: task.config.network_candidates]


def donors_of_task(task: MergeTask, name: str, queries: Sequence[str] = (), tried: Collection[str] = ()) -> list[str]:
    """The few donors of a bundle whose networks have outputs for most of these queries, lenders of layers first."""
    ctx = task.ctx

    def rank(donor: str) -> tuple[int, bool, int, str]:
        lacking = sum(outputs_of(ctx.queries[query], ctx.query(donor)) is None for query in queries)
        return lacking, donor not in ctx.lenders.values(), model_bytes(ctx.query(donor)), donor

    offered = [donor for donor, query in ctx.donors.queries.items() if query.task == name and donor not in tried]
    return sorted(offered, key=rank)[: task.config.network_candidates]


def queries_by_task(ctx: MergeContext) -> dict[str, list[str]]:
    """Task -> its queries, of those with evidence."""
    found = dict[str, list[str]]()
    for query in ctx.judged:
        found.setdefault(ctx.queries[query].task, []).append(query)
    return found


def _extra_flops(ctx: MergeContext, query: str, donor: str) -> float:
    """FLOPs a second more if the donor's network answers the query."""
    own = ctx.queries[query]
    return flops_a_second(ctx.flops, [answered_by(own, ctx.query(donor))]) - flops_a_second(ctx.flops, [own])


def receivers_of(task: MergeTask, donor: str, left: Sequence[str], found: Networks) -> list[str]:
    """The queries that may take the donor's network, those that save most FLOPs first."""
    ctx = task.ctx
    may = [query for query in left if query != donor and (query, donor) not in task.kin]
    may = [query for query in may if not ctx.queries[query].keep_architecture]
    may = [query for query in may if can_answer(ctx.queries[query], ctx.query(donor))]
    extra = {query: _extra_flops(ctx, query, donor) for query in may}
    spare, chosen = -sum(_extra_flops(ctx, *pair) for pair in found.donors.items()), list[str]()
    for query in sorted(may, key=lambda query: (extra[query], query)):
        if extra[query] <= spare:
            chosen.append(query)
            spare -= extra[query]
    return chosen


def best_donor(task: MergeTask, candidates: Sequence[str], left: Sequence[str], found: Networks) -> str | None:
    """The candidate that comes nearest to answering, unchanged, for the most bytes; None where it could be for none."""
    size = {query: model_bytes(task.ctx.queries[query]) for query in left}
    worth = dict[str, float]()
    for donor in candidates:
        may = receivers_of(task, donor, left, found)
        if may and not task.budget.over:
            ratios = _unchanged_ratios(task, donor, may)
            worth[donor] = sum(size[query] * min(1.0, ratios[query] / task.required[query]) for query in may)
    return max(worth, key=lambda donor: worth[donor], default=None)


def _unchanged_ratios(task: MergeTask, donor: str, queries: Sequence[str]) -> dict[str, float]:
    """Query -> its ratio with the donor's network unchanged; 0 where that lacks its classes."""
    ctx = task.ctx

    def evaluate(_: StepCache, query: str) -> float:
        if outputs_of(ctx.queries[query], ctx.query(donor)) is None:
            return 0.0
        found = ctx.substitute({query: donor})
        return found.ratio(query, found.bases[query])

    return ctx.for_each_query(task.checkpoint, Step.NETWORK, queries, evaluate, donor, *queries)


def _serve(task: MergeTask, donor: str, receivers: Sequence[str], found: Networks, trains: bool) -> Networks:
    """What is found, with the receivers that hold with the donor's network."""
    ctx, donors, states = task.ctx, dict(found.donors), dict(found.states)
    unchanged = _unchanged_ratios(task, donor, receivers)

    def try_query(cache: StepCache, query: str) -> NetworkAttempt:
        if unchanged[query] >= task.required[query] or not trains:
            return NetworkAttempt(unchanged[query])
        return _try_network(replace(task, checkpoint=cache), donor, query)

    attempts = ctx.for_each_query(task.checkpoint, Step.NETWORK_TRIAL, receivers, try_query, donor, *receivers)
    spare = -sum(_extra_flops(ctx, *pair) for pair in donors.items())
    for query, tried in attempts.items():
        extra = _extra_flops(ctx, query, donor)
        accepted = tried.ratio >= task.required[query] and extra <= spare
        if accepted:
            spare -= extra
            donors[query] = donor
            if tried.state is not None:
                states[query] = tried.state
        change = Change.NETWORK if tried.state is None else Change.NETWORK_TRAINED
        task.report(
            Event.STEP, step=change.value, query=query, network=donor, saved_bytes=model_bytes(ctx.queries[query]),
            ratio=tried.ratio, required=task.required[query], taken=accepted,
            **asdict(Price.of(ctx, answered_by(ctx.queries[query], ctx.query(donor)), 0, tried.ratio)),
        )  # fmt: skip
    return Networks(donors, states)


def _try_network(task: MergeTask, donor: str, query: str) -> NetworkAttempt:
    """The query on the donor's frozen network, with norms and head of its own trained; longer, if that nearly holds."""
    required, epochs = task.required[query], max(1, task.recipe.epochs // 2)
    attempt = task.checkpoint.step(Step.TRAINED, partial(_train_norms, task, donor, query, epochs), str(epochs))
    nearly = task.config.hard_start * required <= attempt.ratio < required
    if nearly and not task.budget.over:
        epochs = max(epochs, task.recipe.epochs)
        return task.checkpoint.step(Step.TRAINED, partial(_train_norms, task, donor, query, epochs), str(epochs))
    return attempt


def _train_norms(task: MergeTask, donor: str, query: str, epochs: int) -> NetworkAttempt:
    ctx = task.ctx.substitute({query: donor})
    models: Mapping[str, nn.Module] = ctx.models([query])
    freeze_shared(models, network_plan(ctx))
    recipe, ratio = replace(task.private_recipe(epochs, seed=3), evaluate_from=epochs), 0.0
    with suppress(Diverged):
        for ratios in train_epochs(ctx, models, recipe, task.checkpoint, task.budget):
            ratio = ratios[query]
    return NetworkAttempt(ratio, snapshot(models[query]))
