"""What each shared weight alone would do to a query's original: how far it moves what goes into its heads."""

from __future__ import annotations

from collections.abc import Sequence

from merger.checkpoint import State
from merger.core.context import MergeContext
from merger.core.probing import HEAD_FRAMES, answers, distance
from models.sharing.layers import weight_key

SETTLING = 16
"""Train frames on which the norms are measured again; it is judged with them as they were, too."""
PASSES = 2 * HEAD_FRAMES + SETTLING
"""Forward passes that each layer takes; the original has `HEAD_FRAMES` more, once."""


def harms(ctx: MergeContext, query: str, own: State, shared: State, paths: Sequence[str]) -> dict[str, float]:
    """Path -> how far (merger.core.probing) the heads' answers move when this layer alone has its shared weight.

    `own` is the original, in the order of channels of the `shared` weights.
    """
    found = dict[str, float]()
    model = ctx.models([query], {query: own})[query]
    theirs = answers(ctx, query, model)
    for path in paths:
        key = weight_key(own, path)
        model.load_state_dict({**own, key: shared[key]})
        as_is = distance(answers(ctx, query, model), theirs)
        ctx.calibrate(query, model, SETTLING)
        found[path] = min(as_is, distance(answers(ctx, query, model), theirs))
    return found
