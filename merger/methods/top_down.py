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
from dataclasses import dataclass, replace
from functools import partial

from gemel.merger.checkpoint import Checkpoint, Row, Step, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import all_met, evaluation_flops, required_ratios
from gemel.merger.events import Change, Event
from gemel.merger.init.average import kin_pairs, set_similarity
from gemel.merger.init.start import Start, prepare_start
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
    """The steps of a ladder, the least change first; the tunables are `MergeOptions.top_down`."""

    name = "top-down"
    keeps_donors = True
    ties_identical = True

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """Climb the ladder; queries that share nothing keep their originals."""
        config = options.top_down
        task = prepare_task(ctx, SharingPlan(), options, checkpoint)
        kin = ctx.run_on_rank0(lambda: kin_pairs(ctx.layers, ctx.states_that_share(), config.kin_similarity))
        rungs = [rung for rung in make_rungs(options) if rung.change not in config.without]
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
        return [*map(SetTrial, as_they_are), *explain_steps(others, log, required_ratios(ctx, options.margin), flops)]


def make_rungs(options: MergeOptions) -> list[Rung]:
    """The steps in their order."""
    return [
        NetworkRung(Change.NETWORK, options, trains=False), MeanRung(), NetworkRung(Change.NETWORK_TRAINED, options),
        PrivateRung(), TrunkRung(), LayersRung(), HalfRung(),
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


@dataclass(frozen=True)
class NetworkRung:
    """Another query's network answers in a query's place, unchanged or with norms and head trained."""

    change: Change
    options: MergeOptions
    trains: bool = True

    def possible_bytes(self, search: Search) -> int:
        """With the best network of each task for all its queries."""
        return all_networks_bytes(search, with_donors=True)

    def max_flops(self, search: Search) -> float:
        """Of training each query alone."""
        task = search.task
        evaluations = task.config.network_candidates * evaluation_flops(task.ctx)
        return min(evaluations + self.trains * max_private_flops(task), task.budget.flops_left)

    def run(self, search: Search) -> Search:
        """The search with the networks that hold."""
        task = search.task
        with task.checkpoint.open_step(Step.NETWORK, self.change.value) as step:
            if not step.done:
                step.value = find_networks(task, search.networks, self.trains)
        if step.value.donors.keys() == search.networks.donors.keys():
            return search
        tied = search.tied.leaving(step.value.donors)
        later = open_search(task, self.options, step.value, tied)
        return replace(later, best=max(search.best, later.best, key=search.saved_bytes))


@dataclass(frozen=True)
class MeanRung:
    """The mean of kin in as many sets as all queries hold with, the most alike first; no weight is trained."""

    change: Change = Change.MEAN

    def possible_bytes(self, search: Search) -> int:
        """Of the sets whose members are kin."""
        return search.possible_bytes(self._plan(search))

    def max_flops(self, search: Search) -> float:
        """Of the evaluations."""
        return 8 * evaluation_flops(search.layers.ctx)

    def run(self, search: Search) -> Search:
        """The search with the most sets that hold."""
        task, sets = search.layers, self._plan(search).shared
        candidates = list[MergeCandidate]()

        def attempt(index: int) -> tuple[bool, MergeCandidate]:
            plan = SharingPlan(sets[: len(sets) - index])
            start = Start((), snapshots(task.ctx.bases), averages=True)
            tied = task.checkpoint.step(Step.TIED, partial(tie_plan, task, plan, start), str(len(plan.shared)))
            candidates.append(tied)
            return all_met(tied.ratios, task.required), tied

        if not attempt(0)[0]:
            bisect_options(len(sets), attempt, lambda: task.budget.over)
        if not candidates:
            return search
        holding = [candidate.holding(task.required) for candidate in candidates]
        best = max(holding, key=lambda candidate: search.saved_bytes(search.join(candidate)))
        shown = candidates[holding.index(best)]
        report_candidate(search, self.change, shown, task.required)
        return replace(search, tied=best).offer(best)

    def _plan(self, search: Search) -> SharingPlan:
        """The sets of kin, the most alike first, without the donors of a bundle."""
        task = search.layers
        plan = task.plan.without(*task.ctx.donors.queries)
        if not task.kin or not plan.shared:
            return SharingPlan()
        likeness = task.ctx.run_on_rank0(lambda: set_similarity(plan, task.ctx.layers, task.ctx.states_that_share()))
        kin = [members for members in plan.shared if likeness[members] >= task.config.kin_similarity]
        return SharingPlan(tuple(sorted(kin, key=lambda members: -likeness[members])))


@dataclass(frozen=True)
class PrivateRung:
    """Every layer as its donor has it, frozen; norms, head and private layers of the others are trained alone."""

    change: Change = Change.PRIVATE

    def possible_bytes(self, search: Search) -> int:
        """Of all layers that could be shared."""
        return search.possible_bytes(search.layers.plan)

    def max_flops(self, search: Search) -> float:
        """Of training each query alone."""
        return min(max_private_flops(search.layers), search.layers.budget.flops_left)

    def run(self, search: Search) -> Search:
        """The search with the queries that hold."""
        task = search.layers
        with task.checkpoint.open_step(Step.LAYERS, self.change.value) as step:
            if not step.done:
                start = prepare_start(task.ctx, task.plan, search.tied.states)
                step.value = train_private(task, tie_plan(task, task.plan, start))
        report_candidate(search, self.change, step.value, task.least)
        return replace(search, tied=step.value).offer(step.value.holding(task.least))


@dataclass(frozen=True)
class TrunkRung:
    """One network for all queries of a task, trained together."""

    change: Change = Change.TRUNK

    def possible_bytes(self, search: Search) -> int:
        """With the best network of each task for all its queries."""
        return all_networks_bytes(search)

    def max_flops(self, search: Search) -> float:
        """Of a joint training."""
        return max_training_flops(search.task)

    def run(self, search: Search) -> Search:
        """The search with these networks, and what holds of the queries that they do not serve."""
        trained = train_networks(search)
        report_candidate(search, self.change, trained, search.task.least)
        rest = search.best.leaving(trained.states)
        networks = {query: donor for query, donor in rest.networks.items() if query not in trained.states}
        plan = SharingPlan(trained.plan.shared + rest.plan.shared)
        states = {**rest.states, **trained.states}
        return search.offer(MergeCandidate(plan, states, {**networks, **trained.networks}, trained.ratios))


@dataclass(frozen=True)
class LayersRung:
    """All layers that could be shared, trained together."""

    change: Change = Change.LAYERS

    def possible_bytes(self, search: Search) -> int:
        """Of all layers that could be shared; nothing where all are a bundle's, which no training changes."""
        task = search.layers
        return 0 if lent_plan(task.ctx, task.plan) == task.plan else search.possible_bytes(task.plan)

    def max_flops(self, search: Search) -> float:
        """Of a joint training."""
        return max_training_flops(search.layers)

    def run(self, search: Search) -> Search:
        """The search with the queries that hold."""
        return train_layers(search, self.change, search.layers.plan)


@dataclass(frozen=True)
class HalfRung:
    """The heavier half of the bytes trained together, then half of the rest too, and so on, while that saves more."""

    change: Change = Change.HALF

    def possible_bytes(self, search: Search) -> int:
        """Of the heavier half of all layers."""
        plan = plan_without(search.layers.plan, light_layers(search.layers, 0.5))
        return search.possible_bytes(plan)

    def max_flops(self, search: Search) -> float:
        """Of a joint training."""
        return max_training_flops(search.layers)

    def run(self, search: Search) -> Search:
        """The search with the last round that saved more."""
        task, private = search.layers, 1.0
        while not task.budget.over:
            private /= 2
            light = light_layers(task, private)
            if not any(light.values()):
                break
            plan, before = plan_without(task.plan, light), search.saved_bytes(search.best)
            if search.possible_bytes(plan) - before <= search.price(self):
                continue
            search = train_layers(search, self.change, plan, str(private))
            if search.saved_bytes(search.best) <= before:
                break
        return search


def train_layers(search: Search, change: Change, plan: SharingPlan, *parts: str) -> Search:
    """The search with the layers of a plan trained together, from where the last step came to."""
    task = search.layers
    with task.checkpoint.open_step(Step.LAYERS, change.value, *parts) as step:
        if not step.done:
            start = prepare_start(task.ctx, plan, search.tied.states)
            is_kin = bool(task.kin) and {q for pair in task.kin for q in pair} >= plan.queries()
            step.value = train_together(task, tie_plan(task, plan, start), is_kin)
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
