"""The ladder of changes: what a search knows, the steps that it climbs, and the choice of the best.

Each step proposes candidates: models that share under a plan. Steps come in ascending order of what they change in a
model, and of what they cost. A step that could save less than its price is left out; so the ladder ends where no step
is worth what it costs (`--effort`), and a merge out of time keeps the best candidate so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from gemel.merger.checkpoint import storable
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import Price, price_in_bytes, queries_at_target
from gemel.merger.events import Change, Event, StepStart
from gemel.merger.methods.registry import MergeTask, enter_step
from gemel.merger.methods.substitute import Networks
from gemel.models.sharing.layers import model_bytes
from gemel.models.sharing.plan import SharingPlan
from gemel.models.sharing.similarity import add_identical


@storable
@dataclass(frozen=True)
class MergeCandidate(Merged):
    """What a step proposes: a plan, states and networks, and the ratio of each query that it evaluated."""

    ratios: Mapping[str, float] = field(default_factory=dict)

    def holding(self, least: Mapping[str, float]) -> MergeCandidate:
        """The queries that reach this ratio, and what they share without the others."""
        plan = self.plan.without(*(self.ratios.keys() - set(queries_at_target(self.ratios, least))))
        return replace(self, plan=plan).drop_unshared()

    def drop_unshared(self) -> MergeCandidate:
        """Without states and networks of queries that share nothing."""
        queries = self.plan.queries()
        states = {query: state for query, state in self.states.items() if query in queries}
        networks = {query: donor for query, donor in self.networks.items() if query in queries}
        return replace(self, states=states, networks=networks)

    def leaving(self, queries: Iterable[str]) -> MergeCandidate:
        """Without these queries."""
        return replace(self, plan=self.plan.without(*queries)).drop_unshared()


NOTHING = MergeCandidate(SharingPlan(), {})


@dataclass(frozen=True)
class Search:
    """What a search knows.

    `task` has the originals; `layers` has the `networks` that answer in their place, and as its plan the layers that
    could be shared then. `identical` are equal weights. `tied` is what the layers' last step came to, where the next
    one begins, and `best` what saves most of all that holds.
    """

    task: MergeTask
    options: MergeOptions
    layers: MergeTask
    networks: Networks
    identical: SharingPlan
    tied: MergeCandidate
    best: MergeCandidate

    def offer(self, *candidates: MergeCandidate) -> Search:
        """The search with the best of these and of what it has; what changes more must save more."""
        return replace(self, best=max(self.best, *map(self.join, candidates), key=self.saved_bytes))

    def gain(self, possible: int) -> int:
        """Bytes beyond the best of so many that could be saved."""
        return max(0, possible - self.saved_bytes(self.best))

    def price(self, flops: float) -> float:
        """Bytes that a step must be able to save to be worth so many FLOPs."""
        return price_in_bytes(self.task.ctx, self.options, flops)

    def join(self, candidate: MergeCandidate) -> MergeCandidate:
        """A candidate with the networks and the identical weights of the queries that it leaves alone."""
        ctx = self.layers.ctx
        alone = ctx.queries.keys() - candidate.states.keys() - candidate.plan.queries()
        plan = add_identical(candidate.plan, self.identical, alone, ctx.donors.queries)
        networks = {query: donor for query, donor in ctx.networks.items() if query not in candidate.states}
        return replace(candidate, plan=plan, networks={**networks, **candidate.networks})

    def possible_bytes(self, plan: SharingPlan) -> int:
        """Bytes that the layers of a plan could save, with the networks known."""
        return self.saved_bytes(self.join(replace(NOTHING, plan=plan)))

    def finish(self) -> Merged:
        """The best candidate with the state of every query."""
        return self.best.complete(self.task.ctx.substitute(self.best.networks, self.networks.states))

    def saved_bytes(self, candidate: Merged) -> int:
        """Bytes of the originals that a candidate makes unnecessary."""
        return saved_bytes(self.task.ctx, candidate)


def saved_bytes(ctx: MergeContext, merged: Merged) -> int:
    """Bytes of the originals that a state makes unnecessary."""
    substituted = ctx.substitute(merged.networks)
    replaced = sum(
        model_bytes(ctx.queries[query]) - model_bytes(substituted.queries[query]) for query in merged.networks
    )
    return replaced + merged.plan.saved_bytes(substituted.layers)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: what it changes, and what it does with a search.

    That is the most bytes that could be saved after it, the most FLOPs that it takes, and the search after it.
    """

    change: Change
    possible_bytes: Callable[[Search], int]
    max_flops: Callable[[Search], float]
    run: Callable[[Search], Search]


def climb(search: Search, rungs: Sequence[Rung]) -> Search:
    """Take one step after the other, as long as there is time and something left to save."""
    task = search.task
    for index, rung in enumerate(rungs):
        task.ctx.expect(partial(_max_flops, search, rungs[index:]))
        flops = rung.max_flops(search)
        gain, price = search.gain(rung.possible_bytes(search)), search.price(flops)
        start = enter_step(task.ctx, task.checkpoint, task.budget, rung.change, gain, price)
        if start is StepStart.OUT_OF_TIME:
            break
        if start is StepStart.LEFT_OUT:
            continue
        task.ctx.begin(rung.change.value, flops=flops)
        search = rung.run(search)
        best = search.saved_bytes(search.best)
        task.checkpoint.add_row({"after": rung.change.value, "best_bytes": best, "flops": task.ctx.flops.total})
    return search


def _max_flops(search: Search, rungs: Iterable[Rung]) -> float:
    """Of all steps that may begin, were there no limit of time."""
    task, layers = (replace(one, budget=replace(one.budget, ends=math.inf)) for one in (search.task, search.layers))
    search = replace(search, task=task, layers=layers)
    costs = [(rung.max_flops(search), rung.possible_bytes(search)) for rung in rungs]
    return sum(flops for flops, possible in costs if search.gain(possible) > search.price(flops))


def report_candidate(search: Search, change: Change, candidate: MergeCandidate, least: Mapping[str, float]) -> None:
    """A row of the log for each query that a candidate changes: what it saves, its ratio, and whether it holds."""
    ctx = search.layers.ctx.substitute(candidate.networks)
    for query, ratio in candidate.ratios.items():
        found, plan = ctx.queries[query], candidate.plan
        saved = plan.saved_bytes(ctx.layers) - plan.without(query).saved_bytes(ctx.layers)
        search.task.report(
            Event.STEP, step=change.value, query=query, saved_bytes=saved, ratio=ratio, required=least[query],
            taken=ratio >= least[query], **asdict(Price.of(ctx, found, model_bytes(found) - saved, ratio)),
        )  # fmt: skip
