"""How far what the heads of a merged model give lies from what its original's give, on a few train frames.

Channel by channel: what goes into heads keeps its order. For other layers there is `merger.mending.similarity.parted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from merger.bench.workbench import Workbench
from merger.training.features import watched_layers

FRAMES = 16
"""Train frames that the heads are asked on, spread evenly: many layers are judged so."""
LEAST_VARIANCE = 1e-12

Answers = Mapping[str, Sequence[Tensor]]
"""Path of a head -> what it gave on the frames, each time it was called."""


@torch.no_grad()
def answers(bench: Workbench, query: str, model: nn.Module) -> dict[str, list[Tensor]]:
    """What a model's heads give on `FRAMES` of the query's train frames, as plain values; that is work."""
    data, seen = bench.train[query], dict[str, list[Tensor]]()
    indices = torch.linspace(0, len(data) - 1, min(FRAMES, len(data))).long().tolist()
    handles, was_training = [], model.training
    for path in watched_layers(bench.queries[query], model):
        own = seen.setdefault(path, [])
        note = model.get_submodule(path).register_forward_hook(lambda _, __, output, own=own: own.append(output))
        handles.append(note)
    try:
        model.eval()(data.frames(indices, bench.device))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    bench.work.add(bench.queries[query], len(indices))
    return seen


def distance(mine: Answers, theirs: Answers) -> float:
    """Mean over the heads: the mean squared difference of what they gave over the variance of `theirs`.

    0 where there is no head. `theirs` may lie on another device, as after an interruption.
    """
    found = list[float]()
    for path, calls in theirs.items():
        wrong = whole = 0.0
        for one, other in zip(mine[path], calls):
            other = other.to(one.device)
            wrong += float((one - other).square().sum())
            whole += float((other - other.mean()).square().sum())
        found.append(wrong / max(whole, LEAST_VARIANCE))
    return sum(found) / max(1, len(found))
