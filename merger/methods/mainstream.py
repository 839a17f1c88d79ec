"""Mainstream (Jiang et al., USENIX ATC 2018): models of one architecture share a frozen prefix, as long as each can.

The donor of the prefix are the weights that all models of the architecture were trained from, where they name the
same `init`, as in the paper; else the original with the most frames to train on. Norms within the prefix are the
donor's as well and stay frozen. What follows the prefix starts from the query's own original and is trained as in
every other arm; the head never belongs to the prefix. Since nothing that is shared ever changes, queries are
independent of each other, and each one's prefix is found by bisection.
"""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from merger.checkpoint import Checkpoint, State, snapshot, snapshots
from merger.core.attempt import hopeless, train_while
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions, method
from merger.core.snapshot import ModelSnapshot, training_flops
from merger.methods.rate import CHOOSING, at_rates, choose_recipe, chosen, max_flops, tell
from merger.outcomes import Rows, Trial, prefixes
from merger.training.loop import Diverged
from merger.training.recipe import Recipe
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from models.weights import load_matching

SEARCHING = "finding how many first layers each model can share"


@dataclass(frozen=True)
class Family:
    """Queries of one architecture: the paths of the layers a prefix may hold, in order, and the donor's state.

    `end` is the path of the first layer that no prefix may hold; `giver` the query whose original is the donor.
    """

    queries: tuple[str, ...]
    paths: tuple[str, ...]
    end: str
    donor: State
    giver: str | None

    def prefix(self, state: Iterable[str], length: int) -> list[str]:
        """The names of a state dict that belong to a prefix of so many layers: all before the next layer's weight."""
        names = list(state)
        following = self.paths[length] if length < len(self.paths) else self.end
        return names[: names.index(weight_key(names, following))] if length else []


def _sets_tried(ctx: MergeContext, options: MergeOptions, log: Rows, flops: float) -> list[Trial]:
    sets = [[tuple((query, path) for query in one.queries) for path in one.paths] for one in families(ctx)]
    return prefixes(sets, log, options.required(ctx))


@method("mainstream", _sets_tried)
def mainstream(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Give every query the longest prefix of its family's donor with which it reaches its target on val."""
    found = families(ctx)
    searched = options.choose_rate and bool(found)
    ctx.stages.announce([*([CHOOSING] if searched else []), SEARCHING])
    recipe = replace(options.recipe, seed=ctx.seed)
    if searched:
        queries = [query for one in found for query in one.queries]
        ctx.begin(CHOOSING, flops=max_flops(ctx, queries, at_rates(recipe)))
        recipe = _chosen(ctx, recipe, checkpoint, found)
    else:
        tell(ctx, checkpoint, recipe)
    states = snapshots(ctx.originals)
    lengths: dict[str, int] = dict.fromkeys(states, 0)
    budget = Budget.of(ctx, options, checkpoint)
    tries = {query: math.ceil(math.log2(len(one.paths) + 1)) for one in found for query in one.queries}
    search_flops = sum(count * training_flops(ctx, [query], recipe) for query, count in tries.items())
    ctx.begin(SEARCHING, flops=min(search_flops, budget.flops_left))
    for family, query in [(one, query) for one in found for query in one.queries]:
        required = ctx.required(query, options.margin)
        before = checkpoint.step(f"{query} begun", lambda: ctx.flops.total)
        best = checkpoint.step(query, partial(_bisect, ctx, checkpoint, family, query, recipe, required, budget))
        lengths[query] = best["length"]
        states[query] = best["state"] or states[query]
        row = {
            "query": query, "prefix": lengths[query], "layers": len(family.paths), "donor": family.giver,
            "ratio": best["ratio"], "tried": best["tried"], "flops": ctx.flops.total,
            "flops_spent": ctx.flops.total - before,
        }  # fmt: skip
        checkpoint.add_row(row)
        ctx.progress("prefix", **row)
    shared = []
    for family in found:
        for index, path in enumerate(family.paths):
            members = tuple((query, path) for query in family.queries if lengths[query] > index)
            if len(members) > 1:
                shared.append(members)
    return Merged(SharingPlan(tuple(shared)), states)


def families(ctx: MergeContext) -> list[Family]:
    """The architectures that two queries or more have, with their donors."""
    alike: dict[str, list[str]] = defaultdict(list)
    for query in ctx.queries.values():
        alike[json.dumps([query.task, query.model, query.model_args], sort_keys=True, default=str)].append(query.id)
    found = []
    for queries in alike.values():
        layers = [layer for layer in ctx.layers if layer.query == queries[0]]
        heads = [index for index, layer in enumerate(layers) if layer.head]
        first_head = heads[0] if heads else len(layers) - 1
        if len(queries) < 2 or first_head < 1:
            continue
        paths = tuple(layer.path for layer in layers[:first_head])
        donor, giver = _donor(ctx, queries)
        held = [path for path in paths if weight_key(donor, path) in donor]
        usable = next((i for i, path in enumerate(paths) if path not in held), len(paths))
        end = paths[usable] if usable < len(paths) else layers[first_head].path
        if usable:
            found.append(Family(tuple(queries), paths[:usable], end, donor, giver))
    return found


def _donor(ctx: MergeContext, queries: Sequence[str]) -> tuple[State, str | None]:
    """The weights all were trained from, where they say so, else an original; and whose original it is."""
    ancestors = {ctx.queries[query].init for query in queries}
    ancestor = ancestors.pop()
    if ancestor is not None and not ancestors:
        model = copy.deepcopy(ctx.originals[queries[0]])
        loaded = set(load_matching(model, ancestor))
        return {name: tensor for name, tensor in snapshot(model).items() if name in loaded}, None
    giver = max(queries, key=lambda query: len(ctx.train[query]))
    return snapshot(ctx.originals[giver]), giver


def frozen(ctx: MergeContext, family: Family, query: str, length: int) -> nn.Module:
    """The query's model with the donor's prefix of so many layers, which no training changes."""
    model = ctx.models([query])[query]
    names = set(family.prefix(model.state_dict(), length))
    model.load_state_dict({name: t for name, t in family.donor.items() if name in names}, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model


def _chosen(ctx: MergeContext, recipe: Recipe, checkpoint: Checkpoint, found: Sequence[Family]) -> Recipe:
    """The recipe chosen with half of what a prefix may hold frozen."""
    half_way = {q: frozen(ctx, family, q, len(family.paths) // 2) for family in found for q in family.queries}
    start = ModelSnapshot.of(half_way, SharingPlan())
    return chosen(ctx, checkpoint, lambda: choose_recipe(ctx, start, at_rates(recipe), checkpoint))


def _bisect(
    ctx: MergeContext,
    checkpoint: Checkpoint,
    family: Family,
    query: str,
    recipe: Recipe,
    required: float,
    budget: Budget,
) -> dict[str, Any]:
    """The longest prefix that holds, taking for granted that a shorter one holds as well."""
    best: dict[str, Any] = {"length": 0, "state": None, "ratio": 1.0}
    low, high, tried = 0, len(family.paths), []
    if query == family.giver:
        return {**best, "length": high, "tried": []}
    while low < high and not budget.over:
        length = (low + high + 1) // 2
        found = checkpoint.step(
            f"prefix {length}", partial(_try, ctx, checkpoint, family, query, length, recipe, required)
        )
        held = found["state"] is not None
        tried.append([length, found["ratio"]])
        ctx.progress("attempt", query=query, prefix=length, ratio=found["ratio"], held=held)
        if held:
            low, best = length, {"length": length, **found}
        else:
            high = length - 1
    return {**best, "tried": tried}


def _try(
    ctx: MergeContext, checkpoint: Checkpoint, family: Family, query: str, length: int, recipe: Recipe, required: float
) -> dict[str, Any]:
    """Train what follows a prefix until the target is reached: ratio and state, None where it is not."""
    model = frozen(ctx, family, query, length)
    history: list[Mapping[str, float]] = checkpoint.state("trial").setdefault("history", [])
    epochs = train_while(ctx, {query: model}, recipe, checkpoint)
    try:
        for epoch in range(len(history), recipe.epochs + 1):
            ratio = next(epochs)[query] if epoch else checkpoint.step("start", partial(ctx.ratio, query, model))
            history.append({query: ratio})
            if ratio >= required:
                return {"ratio": ratio, "state": snapshot(model)}
            if hopeless(history, {query: required}, recipe.epochs - epoch, recipe.patience):
                break
    except Diverged:
        pass
    return {"ratio": max(row[query] for row in history), "state": None}
