"""The default method, top-down: climb from what changes a model least to what changes it most (merger.methods.ladder).

    identical tensors             tied as they are
    another network, unchanged    answers for a query, with the outputs of its classes
    means of kin                  of fine-tunes of one network, the most alike sets first; nothing is trained
    another network or layers     as another model has them; the query's own norms, head and private layers are trained
    one network for all           of a task, trained
    shared layers                 all tied at once and trained together, then with the heavier half of the bytes alone

A detector gives its weights and keeps them, where it can: boxes hardly agree once weights change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gemel.merger.checkpoint import Checkpoint, Row, Step, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import all_met, evaluation_flops, required_ratios
from gemel.merger.events import Change, Event
from gemel.merger.init.average import average_weights, kin_pairs, set_similarity
from gemel.merger.init.start import start_states
from gemel.merger.methods.epochs import bisect_options
from gemel.merger.methods.joint_training import (
    lent_plan,
    light_layers,
    max_training_flops,
    plan_without,
    tie_plan,
    train_together,
)
from gemel.merger.methods.ladder import NOTHING, MergeCandidate, Rung, Search, climb, report_candidate
from gemel.merger.methods.private import max_private_flops, train_private
from gemel.merger.methods.registry import MergeTask, Method, prepare_task
from gemel.merger.methods.substitute import Networks, donors_of_task, find_networks, queries_by_task
from gemel.merger.methods.trunk import network_bytes, train_networks
from gemel.merger.outcomes import SetTrial, explain_steps
from gemel.models.sharing.groups import groups
from gemel.models.sharing.layers import model_bytes
from gemel.models.sharing.plan import SharingPlan
from gemel.models.sharing.similarity import cosine_likeness, identical_sets, queries_identical


class TopDown(Method):
    """The default: climb a ladder from what changes a model least to what changes it most.

    The tunables are `MergeOptions.top_down`.
    """

    name = "top-down"
    keeps_donors = True
    ties_identical = True

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """Climb the ladder; queries that share nothing keep their originals."""
        config = options.top_down
        task = prepare_task(ctx, SharingPlan(), options, checkpoint)
        kin = ctx.run_on_rank0(lambda: kin_pairs(ctx.layers, ctx.states_that_share(), config.kin_similarity))
        rungs = [rung for rung in make_rungs() if rung.change not in config.without]
        ctx.stages.announce([rung.change.value for rung in rungs])
        search = open_search(replace(task, kin=kin), options, Networks(), NOTHING)
        if not search.layers.plan.shared and not search.best.plan.shared and len(ctx.judged) > 1:
            ctx.warn("no two models have a layer in common that saves enough")
        return climb(search, rungs).finish()

    def explain(self, ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
        """How each set of the whole plan was tried; sets of settled queries needed no training."""
        settled = {query for row in log for query in row.get("identical", ())}
        sets = whole_plan(ctx, options).shared
        as_they_are = [members for members in sets if members[0][0] in settled]
        others = [members for members in sets if members[0][0] not in settled]
        return [*map(SetTrial, as_they_are), *explain_steps(others, log, required_ratios(ctx), flops)]


def make_rungs() -> list[Rung]:
    """The steps in their order."""
    network, trained = (
        Rung(
            change, partial(all_networks_bytes, with_donors=True), partial(max_network_flops, change),
            partial(serve_by_networks, change),
        )
        for change in (Change.NETWORK, Change.NETWORK_TRAINED)
    )  # fmt: skip
    return [
        network,
        Rung(
            Change.MEAN, lambda search: search.possible_bytes(kin_plan(search)),
            lambda search: 8 * evaluation_flops(search.layers.ctx), average_kin,
        ),
        trained,
        Rung(
            Change.PRIVATE, lambda search: search.possible_bytes(search.layers.plan),
            lambda search: min(max_private_flops(search.layers), search.layers.budget.flops_left), train_alone,
        ),
        Rung(Change.TRUNK, all_networks_bytes, lambda search: max_training_flops(search.task), train_trunk),
        Rung(
            Change.LAYERS, joint_bytes, max_joint_flops,
            lambda search: train_layers(search, Change.LAYERS, search.layers.plan),
        ),
        Rung(
            Change.HALF, lambda search: search.possible_bytes(heavy_plan(search, 0.5)), max_joint_flops, train_halves,
        ),
    ]  # fmt: skip


def open_search(task: MergeTask, options: MergeOptions, networks: Networks, tied: MergeCandidate) -> Search:
    """What is known once these networks are, with identical weights tied."""
    ctx = task.ctx.substitute(networks.donors, networks.states)
    whole = ctx.run_on_rank0(partial(whole_plan, ctx, options))
    identical, settled = SharingPlan(), set[str]()
    if Change.IDENTICAL not in options.top_down.without:
        identical = identical_sets(whole, ctx.states_that_share())
        settled = queries_identical(whole, identical) & ctx.queries.keys()
    layers = replace(task, ctx=ctx, plan=whole.without(*settled))
    search = Search(task, options, layers, networks, identical, tied, NOTHING)
    search = search.offer(NOTHING)
    if identical.shared:
        saved = search.saved_bytes(search.best)
        task.report(Event.IDENTICAL, identical=sorted(settled), sets=len(identical.shared), saved_bytes=saved)
    return search


def whole_plan(ctx: MergeContext, options: MergeOptions) -> SharingPlan:
    """Every group that saves enough; layers that repeat within models are paired by the likeness of their weights."""
    total = sum(model_bytes(query) for query in ctx.queries.values())
    likeness = cosine_likeness(ctx.states_that_share())
    candidates = [group for layers in ctx.layers_by_lender() for group in groups(layers, "wide", likeness=likeness)]
    return SharingPlan.of(group for group in candidates if group.saved_bytes >= options.min_saving * total)


def max_network_flops(change: Change, search: Search) -> float:
    """FLOPs of evaluating the candidates, and of training each query alone."""
    task = search.task
    flops = task.config.network_candidates * evaluation_flops(task.ctx)
    if change is Change.NETWORK_TRAINED:
        flops += max_private_flops(task)
    return min(flops, task.budget.flops_left)


def serve_by_networks(change: Change, search: Search) -> Search:
    """The search with the networks that hold in the place of others, unchanged or with norms and head trained."""
    task = search.task
    with task.checkpoint.open_step(Step.NETWORK, change.value) as step:
        if not step.done:
            step.value = find_networks(task, search.networks, change is Change.NETWORK_TRAINED)
    if step.value.donors.keys() == search.networks.donors.keys():
        return search
    tied = search.tied.leaving(step.value.donors)
    later = open_search(task, search.options, step.value, tied)
    return replace(later, best=max(search.best, later.best, key=search.saved_bytes))


def average_kin(search: Search) -> Search:
    """The search with the mean of kin in as many sets as all queries hold with; no weight is trained."""
    task, sets = search.layers, kin_plan(search).shared
    candidates = list[MergeCandidate]()

    def holds(index: int) -> bool:
        plan = SharingPlan(sets[: len(sets) - index])
        states = average_weights(plan, snapshots({query: task.ctx.bases[query] for query in plan.queries()}))
        tied = task.checkpoint.step(Step.TIED, partial(tie_plan, task, plan, states), str(len(plan.shared)))
        candidates.append(tied)
        return all_met(tied.ratios, task.required)

    if not holds(0):
        bisect_options(len(sets), holds, lambda: task.budget.over)
    holding = [candidate.holding(task.required) for candidate in candidates]
    best = max(holding, key=lambda candidate: search.saved_bytes(search.join(candidate)))
    report_candidate(search, Change.MEAN, candidates[holding.index(best)], task.required)
    return replace(search, tied=best).offer(best)


def kin_plan(search: Search) -> SharingPlan:
    """The sets of kin, the most alike first, without the donors of a bundle."""
    task = search.layers
    plan = task.plan.without(*task.ctx.donors.queries)
    if not task.kin or not plan.shared:
        return SharingPlan()
    likeness = task.ctx.run_on_rank0(lambda: set_similarity(plan, task.ctx.layers, task.ctx.states_that_share()))
    kin = [members for members in plan.shared if likeness[members] >= task.config.kin_similarity]
    return SharingPlan(tuple(sorted(kin, key=lambda members: -likeness[members])))


def train_alone(search: Search) -> Search:
    """Every layer as its donor has it, frozen; norms, head and private layers of the others are trained alone."""
    task = search.layers
    with task.checkpoint.open_step(Step.LAYERS, Change.PRIVATE.value) as step:
        if not step.done:
            states = start_states(task.ctx, task.plan, search.tied.states)
            step.value = train_private(task, tie_plan(task, task.plan, states))
    report_candidate(search, Change.PRIVATE, step.value, task.least)
    return replace(search, tied=step.value).offer(step.value.holding(task.least))


def train_trunk(search: Search) -> Search:
    """One network for all queries of a task, trained together, and what holds of the queries that it does not serve."""
    trained = train_networks(search)
    report_candidate(search, Change.TRUNK, trained, search.task.least)
    return search.offer(trained.join(search.best.leaving(trained.states)))


def joint_bytes(search: Search) -> int:
    """Bytes of all layers that could be shared; nothing where all are a bundle's, which no training changes."""
    task = search.layers
    return 0 if lent_plan(task.ctx, task.plan) == task.plan else search.possible_bytes(task.plan)


def max_joint_flops(search: Search) -> float:
    """FLOPs of a joint training of layers."""
    return max_training_flops(search.layers)


def heavy_plan(search: Search, private: float) -> SharingPlan:
    """All layers that could be shared without the lightest, this fraction of their bytes."""
    return plan_without(search.layers.plan, light_layers(search.layers, private))


def train_halves(search: Search) -> Search:
    """The heavier half of the bytes trained together, then half of the rest too, and so on, while that saves more."""
    task, private = search.layers, 1.0
    while not task.budget.over:
        private /= 2
        plan, before = heavy_plan(search, private), search.saved_bytes(search.best)
        if plan == task.plan:
            break
        if search.possible_bytes(plan) - before <= search.price(max_joint_flops(search)):
            continue
        search = train_layers(search, Change.HALF, plan, str(private))
        if search.saved_bytes(search.best) <= before:
            break
    return search


def train_layers(search: Search, change: Change, plan: SharingPlan, *parts: str) -> Search:
    """The search with the layers of a plan trained together, from where the last step came to."""
    task = search.layers
    with task.checkpoint.open_step(Step.LAYERS, change.value, *parts) as step:
        if not step.done:
            states = start_states(task.ctx, plan, search.tied.states)
            is_kin = bool(task.kin) and {q for pair in task.kin for q in pair} >= plan.queries()
            step.value = train_together(task, tie_plan(task, plan, states), is_kin)
    last, best = step.value
    report_candidate(search, change, last, task.least)
    return replace(search, tied=last).offer(best, last.holding(task.least))


def all_networks_bytes(search: Search, with_donors: bool = False) -> int:
    """Bytes saved with the best network of each task for all its queries, also one of the donors of a bundle."""
    task = search.task
    return sum(
        network_bytes(task, queries, donors_of_task(task, name) if with_donors else ())
        for name, queries in queries_by_task(task.ctx).items()
    )
