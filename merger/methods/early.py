"""Early layers: light, and what they lose of a frame no later layer gives back, so that each query has its own.

While all train, the first layers of each query, a small part of the bytes it could share, stay apart. Measured:
docs/lab-notes.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from merger.checkpoint import Checkpoint
from merger.core.context import MergeContext
from merger.core.merged import Merged
from models.sharing.plan import SharingPlan

EARLY = 1 / 32
"""The part of the bytes it could share that a query's first layers may have to be its own while all train."""
EARLY_APART = "keeps its early layers"
"""The step of a log that says which layers a query had to itself from the beginning."""
LOSES_MUCH = "the start, which loses much"


def early_layers(ctx: MergeContext, plan: SharingPlan) -> dict[str, list[str]]:
    """Query -> the first layers of those that it shares under a plan, a small part of their bytes.

    A layer that is all that somebody shares is none of them.
    """
    found = dict[str, list[str]]()
    for query in sorted(plan.queries()):
        mine = {path for members in plan.shared for name, path in members if name == query}
        layers = [layer for layer in ctx.layers if layer.query == query and layer.path in mine]
        upto = accumulate(layer.bytes for layer in layers)
        most = EARLY * sum(layer.bytes for layer in layers)
        found[query] = [layer.path for layer, so_far in zip(layers, upto, strict=True) if so_far <= most]
    later = plan_without(plan, found)
    lost = plan.queries() - later.queries()
    needed = {member for members in plan.shared if lost & dict(members).keys() for member in members}
    return {query: [path for path in paths if (query, path) not in needed] for query, paths in found.items()}


def plan_without(plan: SharingPlan, early: Mapping[str, Sequence[str]]) -> SharingPlan:
    """The plan in which each query has these layers to itself."""
    for query, paths in early.items():
        plan = plan.with_private(query, paths)
    return plan


def tell_early(
    ctx: MergeContext, early: Mapping[str, Sequence[str]], merged: Merged, checkpoint: Checkpoint,
    required: Mapping[str, float],
) -> None:  # fmt: skip
    """Write down which early layers those who share have to themselves in the end, where no row says why yet."""
    told = {member for members in merged.plan.shared for member in members}
    told |= {(row["query"], path) for row in checkpoint.log for path in row.get("private", ())}
    adopted = any("sets" in row for row in checkpoint.log)
    for query in sorted(merged.plan.queries() & early.keys()) if not adopted else ():
        if private := [path for path in early[query] if (query, path) not in told]:
            checkpoint.add_row({"query": query, "repair": EARLY_APART, "private": private, "after": LOSES_MUCH,
                             "ratio": None, "required": required[query], "flops": ctx.flops.total})  # fmt: skip
