"""How far the features of a merged model lie from its original's, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from merger.bench.probing import modules_among
from merger.bench.workbench import Workbench

FRAMES = 64
BATCH = 16
LEAST_VARIANCE = 1e-12


Outputs = Mapping[str, Sequence[Tensor]]
"""Path -> what the layer gave on a batch, each time it was called."""


def distances(
    bench: Workbench, query: str, model: nn.Module, paths: Iterable[str], frames_used: int = FRAMES
) -> dict[str, float]:
    """Path -> how far the layer's outputs lie from the original's (`apart`), on train frames.

    Channel by channel, so for layers whose channels have kept their order, as those before the heads have; for others
    there is `merger.mending.similarity.parted`. Paths that are no module (packed projections) are left out.
    """
    original = bench.originals[query]
    paths = modules_among(original, paths)
    return apart(*(outputs(bench, query, one, paths, frames_used) for one in (model, original)))


def outputs(
    bench: Workbench, query: str, model: nn.Module, paths: Sequence[str], frames_used: int
) -> Iterator[Outputs]:
    """What these layers of a model give on train frames, spread evenly, batch by batch."""
    data = bench.train[query]
    indices = torch.linspace(0, len(data) - 1, min(frames_used, len(data))).long().tolist()
    for start in range(0, len(indices), BATCH):
        batch, was_training = indices[start : start + BATCH], model.training
        model.eval()
        with torch.no_grad(), _outputs(model, paths) as found:
            model(data.frames(batch, bench.device))
        model.train(was_training)
        bench.work.add(bench.queries[query], len(batch))
        yield found


def apart(mine: Iterable[Outputs], theirs: Iterable[Outputs]) -> dict[str, float]:
    """Path -> mean squared difference of two layers' outputs, batch by batch, over the variance of the second's."""
    wrong, whole = dict[str, float](), dict[str, float]()
    for ours, others in zip(mine, theirs, strict=True):
        for path, calls in others.items():
            wrong[path] = wrong.get(path, 0.0) + sum(float((a - b).square().sum()) for a, b in zip(ours[path], calls))
            whole[path] = whole.get(path, 0.0) + sum(float((b - b.mean()).square().sum()) for b in calls)
    return {path: wrong[path] / max(whole[path], LEAST_VARIANCE) for path in wrong}


@contextmanager
def _outputs(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _, __, output, own=seen[path]: own.append(output))
        for path in paths
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
