"""What each shared weight alone would do to a query's original: how far it moves what goes into its heads."""

from __future__ import annotations

from collections.abc import Sequence

from merger.bench.merged import State
from merger.bench.workbench import Workbench
from merger.beyond.distance import apart, outputs
from merger.training.features import watched_layers
from models.sharing.layers import weight_key

FRAMES = 16
"""Train frames that a layer is judged by."""
SETTLING = 16
"""Train frames on which the norms are measured again; it is judged with them as they were, too."""
PASSES = 2 * FRAMES + SETTLING
"""Forward passes that each layer takes; the original has `FRAMES` more, once."""


def harms(bench: Workbench, query: str, own: State, shared: State, paths: Sequence[str]) -> dict[str, float]:
    """Path -> the distance (merger.beyond.distance) of the heads' outputs when this layer alone has its shared weight.

    `own` is the original, in the order of channels of the `shared` weights.
    """
    found = dict[str, float]()
    model = bench.models([query], {query: own})[query]
    heads = watched_layers(bench.queries[query], model)
    theirs = list(outputs(bench, query, model, heads, FRAMES))
    for path in paths:
        key = weight_key(own, path)
        model.load_state_dict({**own, key: shared[key]})
        as_is = apart(outputs(bench, query, model, heads, FRAMES), theirs)
        bench.calibrate(query, model, SETTLING)
        again = apart(outputs(bench, query, model, heads, FRAMES), theirs)
        found[path] = min(sum(one.values()) / max(1, len(one)) for one in (as_is, again))
    return found
