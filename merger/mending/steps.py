"""What can be tried to help one query: its private parts alone, or private copies of ever more of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from merger.checkpoint import StepCache
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.core.probing import modules_among
from merger.mending.similarity import parted
from models.sharing.plan import SharingPlan

UNSHARED = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""The part of a query's shared bytes that become private copies, step by step."""
MAX_STEPS = 1 + len(UNSHARED).bit_length()
"""About so many steps are taken: private parts, then the dearest copies and a bisection."""


@dataclass(frozen=True)
class Step:
    """What is done, the plan it leads to, the bytes it costs, and the layers that become private."""

    what: str
    plan: SharingPlan
    cost_bytes: int
    private: tuple[str, ...] = ()


def private_parts(merged: Merged) -> Step:
    """What the query has for itself already, its norms and head."""
    return Step("norms and head", merged.plan, 0)


def copies(ctx: MergeContext, merged: Merged, query: str, journal: StepCache) -> list[Step]:
    """Private copies of the layers whose answers have parted most from the original's, in ascending order of bytes."""
    size = bytes_shared(ctx, merged, query)
    furthest = journal.step("parted", partial(_furthest, ctx, merged, query, list(size)))
    steps: list[Step] = []
    for part in UNSHARED:
        chosen, cost = [], 0
        for path in furthest:
            if cost < part * sum(size.values()):
                chosen.append(path)
                cost += size[path]
        if not steps or cost > steps[-1].cost_bytes:
            what = f"{cost / sum(size.values()):.1%} of its shared bytes private"
            steps.append(Step(what, merged.plan.with_private(query, chosen), cost, tuple(chosen)))
    return steps


def bytes_shared(ctx: MergeContext, merged: Merged, query: str) -> dict[str, int]:
    """Path -> bytes of each layer that the query shares."""
    size = {layer.path: layer.bytes for layer in ctx.layers if layer.query == query}
    return {path: size[path] for members in merged.plan.shared for name, path in members if name == query}


def _furthest(ctx: MergeContext, merged: Merged, query: str, shared: Sequence[str]) -> list[str]:
    model = ctx.models([query], merged.states, merged.plan)[query]
    found = parted(ctx, query, model, shared)
    return sorted(modules_among(model, shared), key=lambda path: -found.get(path, 0.0))
