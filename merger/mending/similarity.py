"""Where a merged model and its original have parted, though their channels may stand in different orders.

Two layers' answers to the same frames are compared by linear CKA, which minds neither the order of channels nor scale
(Kornblith, Norouzi, Lee and Hinton, Similarity of Neural Network Representations Revisited, ICML 2019, section 3), with
the unbiased estimate of HSIC (Song et al., Feature Selection via Dependence Maximization, 2012), because frames are
few and features many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merger.core.context import MergeContext
from merger.core.probing import as_input, modules_among, raw_frames, tapped

FRAMES = 64
MIN_FRAMES = 4
"""The unbiased estimate needs as many."""
BATCH = 16
CELLS = 2
"""Maps are averaged down to so many places a side."""


@torch.no_grad()
def parted(ctx: MergeContext, query: str, model: nn.Module, paths: Iterable[str]) -> dict[str, float]:
    """Path -> 1 less the CKA of a merged model's layer with its original's, on train frames; 0 where nothing changed.

    Paths that are no module (packed projections) are left out.
    """
    paths, was_training = list(paths), model.training
    mine, theirs = (_features(ctx, query, one, paths) for one in (model.eval(), ctx.originals[query]))
    model.train(was_training)
    return {path: 1 - linear_cka(mine[path], theirs[path]) for path in mine if path in theirs}


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two sets of features of the same frames, f32 (N, F) and (N, G), N at least 4; 0 where one is flat.

    At most 1; unrelated features give about 0, on either side of it.
    """
    a, b = _gram(one), _gram(other)
    own = _hsic(a, a) * _hsic(b, b)
    return float(_hsic(a, b) / own.sqrt()) if own > 0 else 0.0


def _features(ctx: MergeContext, query: str, model: nn.Module, paths: Iterable[str]) -> dict[str, Tensor]:
    """Path -> outputs of a layer of this query's model on train frames, averaged over places: (N, F)."""
    frames, paths = raw_frames(ctx, query, FRAMES), modules_among(model, paths)
    rows: dict[str, list[Tensor]] = {path: [] for path in paths}
    for start in range(0, len(frames), BATCH):
        chunk = frames[start : start + BATCH]
        with tapped(model, paths) as seen:
            model(as_input(ctx, query, chunk))
        for path in paths:
            rows[path].append(_pooled(seen[path][1], len(chunk)))
    ctx.flops.add(ctx.queries[query], len(frames))
    found = {path: torch.cat(own) for path, own in rows.items()}
    return {path: own for path, own in found.items() if len(own) == len(frames) >= MIN_FRAMES}


def _pooled(output: Tensor, frames: int) -> Tensor:
    """One row of features per frame; a layer that answers once per region of a frame gives their mean."""
    if output.ndim == 4:
        output = F.adaptive_avg_pool2d(output, CELLS)
    if len(output) % frames:
        return output[:0].flatten(1)  # as many regions as it pleased: rows of no frame
    return output.unflatten(0, (frames, -1)).mean(1).flatten(1)


def _gram(x: Tensor) -> Tensor:
    x = x.double() - x.double().mean(0)
    gram = x @ x.T
    return gram.fill_diagonal_(0.0)


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    """Unbiased HSIC of two kernel matrices (n, n) with empty diagonals (Song et al. 2012, equation 5)."""
    n = len(a)
    whole = (a * b).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a.sum(0) @ b.sum(0))
    return whole / (n * (n - 3))
