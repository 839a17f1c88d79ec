"""How far the features of a merged model lie from its original's, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from merger.bench.probing import modules_among
from merger.bench.workbench import Workbench

FRAMES = 64
BATCH = 16
LEAST_VARIANCE = 1e-12


@torch.no_grad()
def distances(
    bench: Workbench, query: str, model: nn.Module, paths: Iterable[str], frames_used: int = FRAMES
) -> dict[str, float]:
    """Path -> mean squared difference of the layer's outputs over the variance of the original's, on train frames.

    Channel by channel, so for layers whose channels have kept their order, as those before the heads have; for others
    there is `merger.mending.similarity.parted`. Paths that are no module (packed projections) are left out.
    """
    original, data = bench.originals[query], bench.train[query]
    paths = modules_among(original, paths)
    wrong, whole = dict.fromkeys(paths, 0.0), dict.fromkeys(paths, 0.0)
    indices = torch.linspace(0, len(data) - 1, min(frames_used, len(data))).long().tolist()
    was_training = model.training
    model.eval()
    for start in range(0, len(indices), BATCH):
        frames = data.frames(indices[start : start + BATCH], bench.device)
        with _outputs(original, paths) as theirs, _outputs(model, paths) as mine:
            original(frames)
            model(frames)
        for path in paths:
            for one, other in zip(mine[path], theirs[path]):
                wrong[path] += float((one - other).square().sum())
                whole[path] += float((other - other.mean()).square().sum())
    model.train(was_training)
    bench.work.add(bench.queries[query], 2 * len(indices))
    return {path: wrong[path] / max(whole[path], LEAST_VARIANCE) for path in paths}


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
