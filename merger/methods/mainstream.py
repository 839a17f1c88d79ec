"""Mainstream (Jiang et al., USENIX ATC 2018): models of one architecture share a frozen prefix, each as long as it can.

The donor of the prefix are the weights that all models of the architecture were trained from, if they name the same
`init`, as in the paper; else the original with the most train frames. Norms within the prefix are the donor's too and
stay frozen. What follows starts from the query's own original and is trained; the head never belongs to the prefix.
Shared weights never change, so queries are independent, and each prefix is found by bisection.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from merger.budget import Budget
from merger.checkpoint import Checkpoint, Row, State, Step, StepCache, snapshot, snapshots, storable
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import required_ratios, training_flops
from merger.events import Event
from merger.methods.epochs import bisect_options, is_hopeless, train_epochs
from merger.methods.registry import register_method
from merger.outcomes import SetTrial, explain_prefixes
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from models.weights import load_matching
from models.workload import Query
from models.zoo.user_models import is_model_file

SEARCHING_PREFIXES = "finding how many first layers each model can share"


@dataclass(frozen=True)
class Family:
    """Queries of one architecture: the layers a prefix may hold, in order, and the donor's state.

    `end` is the path of the first layer that no prefix may hold; `donor_query` is that whose original is the donor.
    """

    queries: tuple[str, ...]
    paths: tuple[str, ...]
    end: str
    donor: State
    donor_query: str | None

    def prefix(self, state: Iterable[str], length: int) -> list[str]:
        """The names of a state dict that belong to a prefix of so many layers: all before the next layer's weight."""
        names = list(state)
        following = self.paths[length] if length < len(self.paths) else self.end
        return names[: names.index(weight_key(names, following))] if length else []


@storable
@dataclass(frozen=True)
class Prefix:
    """A prefix of so many layers, the query's best ratio on val with it, and its state where that is enough."""

    length: int
    ratio: float
    state: State | None = None


def explain_mainstream(ctx: MergeContext, options: MergeOptions, log: Sequence[Row], flops: float) -> list[SetTrial]:
    """How each layer of each family was tried."""
    sets = [[tuple((query, path) for query in one.queries) for path in one.paths] for one in find_families(ctx)]
    return explain_prefixes(sets, log, required_ratios(ctx, options.margin))


@register_method("mainstream", explain_mainstream)
def mainstream(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Give every query the longest prefix of its family's donor with which it reaches its target on val."""
    families, recipe = find_families(ctx), replace(options.recipe, seed=ctx.seed)
    checkpoint.add_row({"recipe": dict(recipe.__dict__), "flops": ctx.flops.total})
    ctx.stages.announce([SEARCHING_PREFIXES])
    budget, required = Budget.of(ctx, options, checkpoint), required_ratios(ctx, options.margin)
    tries = {query: math.ceil(math.log2(len(one.paths) + 1)) for one in families for query in one.queries}
    flops = sum(count * training_flops(ctx, [query], recipe) for query, count in tries.items())
    ctx.begin(SEARCHING_PREFIXES, flops=min(flops, budget.flops_left))
    states, lengths = snapshots(ctx.originals), dict.fromkeys(ctx.queries, 0)
    for family, query in [(one, query) for one in families for query in one.queries]:
        before = checkpoint.step(Step.BEGUN, lambda: ctx.flops.total, query)
        find = partial(_longest_prefix, ctx, checkpoint, family, query, recipe, required[query], budget)
        found, tried = checkpoint.step(Step.QUERY, find, query)
        lengths[query], states[query] = found.length, found.state or states[query]
        row = {
            "query": query, "prefix": lengths[query], "layers": len(family.paths), "donor": family.donor_query,
            "ratio": found.ratio, "tried": tried, "flops": ctx.flops.total, "flops_spent": ctx.flops.total - before,
        }  # fmt: skip
        checkpoint.add_row(row)
        ctx.report(Event.PREFIX, **row)
    plan = SharingPlan()
    for family in families:
        for index, path in enumerate(family.paths):
            plan = plan.with_set((query, path) for query in family.queries if lengths[query] > index)
    return Merged(plan, states)


def architecture_key(query: Query) -> Hashable:
    """Equal for queries of one architecture."""
    return json.dumps([query.task, query.model, query.model_args], sort_keys=True, default=str)


def find_families(
    ctx: MergeContext,
    key: Callable[[Query], Hashable] = architecture_key,
    donor_of: Callable[[MergeContext, Sequence[str]], tuple[State, str | None]] | None = None,
) -> list[Family]:
    """The sets of two queries or more of one architecture that have an equal `key`, with their donors."""
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for query in map(ctx.queries.__getitem__, ctx.judged):
        alike[key(query)].append(query.id)
    found = []
    for queries in alike.values():
        layers = [layer for layer in ctx.layers if layer.query == queries[0]]
        heads = [index for index, layer in enumerate(layers) if layer.head]
        first_head = heads[0] if heads else len(layers) - 1
        if len(queries) < 2 or first_head < 1:
            continue
        paths = tuple(layer.path for layer in layers[:first_head])
        donor, donor_query = (donor_of or find_donor)(ctx, queries)
        usable = next((i for i, path in enumerate(paths) if weight_key(donor, path) not in donor), len(paths))
        end = paths[usable] if usable < len(paths) else layers[first_head].path
        if usable:
            found.append(Family(tuple(queries), paths[:usable], end, donor, donor_query))
    return found


def freeze_prefix(ctx: MergeContext, family: Family, query: str, length: int, state: State | None = None) -> nn.Module:
    """The query's model, with the weights of `state` or its base's, and the donor's frozen prefix of so many layers."""
    model = ctx.models([query], None if state is None else {query: state})[query]
    names = set(family.prefix(model.state_dict(), length))
    model.load_state_dict({name: t for name, t in family.donor.items() if name in names}, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def find_donor(ctx: MergeContext, queries: Sequence[str]) -> tuple[State, str | None]:
    """The weights all were trained from, if they name them (a file that is a network itself has no names of layers that
    fit), else an original; and whose original it is."""
    ancestors = {ctx.queries[query].init for query in queries}
    ancestor = ancestors.pop()
    if ancestor is not None and not ancestors and not is_model_file(str(ancestor)):
        model = copy.deepcopy(ctx.originals[queries[0]])
        loaded = set(load_matching(model, ancestor))
        return {name: tensor for name, tensor in snapshot(model).items() if name in loaded}, None
    donor_query = most_frames(ctx, queries)
    return snapshot(ctx.originals[donor_query]), donor_query


def most_frames(ctx: MergeContext, queries: Sequence[str]) -> str:
    """The query with the most train frames."""
    return max(queries, key=lambda query: len(ctx.train[query]))


def _longest_prefix(
    ctx: MergeContext, cache: StepCache, family: Family, query: str, recipe: Recipe, required: float, budget: Budget
) -> tuple[Prefix, list[list[float]]]:
    """The longest prefix that holds, by bisection (a shorter one is taken to hold as well), and all tried with their
    ratios."""
    tried: list[list[float]] = []
    if query == family.donor_query:
        return Prefix(len(family.paths), 1.0), tried

    def attempt(index: int) -> tuple[bool, Prefix]:
        length = len(family.paths) - index
        train = partial(_train_after_prefix, ctx, cache, family, query, length, recipe, required)
        found = cache.step(Step.PREFIX, train, str(length))
        held = found.state is not None
        tried.append([length, found.ratio])
        ctx.report(Event.ATTEMPT, query=query, prefix=length, ratio=found.ratio, held=held)
        return held, found

    found = bisect_options(len(family.paths), attempt, lambda: budget.over)
    return found[1] if found else Prefix(0, 1.0), tried


def _train_after_prefix(
    ctx: MergeContext, cache: StepCache, family: Family, query: str, length: int, recipe: Recipe, required: float
) -> Prefix:
    """Train what follows a prefix until the target is reached; no state if it is not."""
    model = freeze_prefix(ctx, family, query, length)
    history: list[Mapping[str, float]] = cache.state(Step.PROGRESS).setdefault("history", [])
    epochs = train_epochs(ctx, {query: model}, recipe, cache)
    with suppress(Diverged):
        for epoch in range(len(history), recipe.epochs + 1):
            ratio = next(epochs)[query] if epoch else cache.step(Step.BEGUN, partial(ctx.ratio, query, model))
            history.append({query: ratio})
            if ratio >= required:
                return Prefix(length, ratio, snapshot(model))
            if is_hopeless(history, {query: required}, recipe.epochs - epoch, recipe.patience):
                break
    return Prefix(length, max(row[query] for row in history))
