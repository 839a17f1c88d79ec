"""The paper's alternative orders for the same search: earliest, latest, random, and one model at a time.

GEMEL (NSDI 2023) compares its order, most bytes first, with these. `one-model` is read as: models join one after the
other, in the workload's order, each with all its groups before the next one comes.
"""

from __future__ import annotations

import random

from merger.checkpoint import Checkpoint
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.method import MergeOptions, method
from merger.methods.paper import search, sets_tried, worthwhile
from models.sharing.groups import Group


@method("earliest", sets_tried)
def earliest(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Groups nearest the input first."""
    queue = worthwhile(ctx, options)
    return search(ctx, options, checkpoint, sorted(queue, key=_places(ctx)))


@method("latest", sets_tried)
def latest(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Groups nearest the output first."""
    place = _places(ctx)
    queue = worthwhile(ctx, options)
    return search(ctx, options, checkpoint, sorted(queue, key=lambda group: -place(group)))


@method("random", sets_tried)
def shuffled(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """Groups in an order drawn from the seed."""
    queue = worthwhile(ctx, options)
    random.Random(ctx.seed).shuffle(queue)
    return search(ctx, options, checkpoint, queue)


@method("one-model", sets_tried)
def one_model(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """One model after the other joins those before it, group by group, the groups that save most first."""
    return search(ctx, options, checkpoint, one_by_one(worthwhile(ctx, options), list(ctx.queries)))


def one_by_one(queue: list[Group], queries: list[str]) -> list[Group]:
    """Each group cut into as many as it has members beyond the first: those up to each further query, in order."""
    joining = []
    for place, query in enumerate(queries):
        for group in queue:
            members = tuple(m for m in sorted(group.members, key=_order(queries)) if queries.index(m[0]) <= place)
            if len(members) > 1 and members[-1][0] == query:
                joining.append(Group(group.signature, members, group.bytes, group.paired))
    return joining


def _order(queries: list[str]):
    return lambda member: queries.index(member[0])


def _places(ctx: MergeContext):
    """From a group to the mean place of its layers in their networks, 0 the first and 1 the last."""
    place = {(layer.query, layer.path): layer.position for layer in ctx.layers}
    return lambda group: sum(place[member] for member in group.members) / len(group.members)
