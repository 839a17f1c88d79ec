"""What layers see on a few frames: the frames, the inputs and outputs of some layers of a model on them, and how far
the answers of a merged model's heads lie from its original's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from merger.core.context import MergeContext
from merger.training.distillation import watched_layers

HEAD_FRAMES = 16
"""Train frames that heads are asked on, spread evenly: many layers are judged so."""
MIN_VARIANCE = 1e-12

Answers = Mapping[str, Sequence[Tensor]]
"""Path of a head -> what it gave on the frames, each time it was called."""


def raw_frames(ctx: MergeContext, query: str, count: int) -> list[np.ndarray]:
    """So many train frames of a query, spread evenly over its split and as they were decoded."""
    frames = ctx.train[query].prepared.split.frames
    indices = torch.linspace(0, len(frames) - 1, min(count, len(frames))).long().tolist()
    return [frames[index] for index in indices]


def as_input(ctx: MergeContext, query: str, frames: Iterable[np.ndarray]) -> Tensor:
    """Frames of whatever query as this query's model takes them, f32 (N, 3, S, S)."""
    preprocess = ctx.train[query].preprocess
    return preprocess.normalise(torch.stack([preprocess.resize(frame) for frame in frames])).to(ctx.device)


def modules_among(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """The paths that are modules of their own (packed projections are none), each once."""
    known = {path for path, _ in model.named_modules()}
    return [path for path in dict.fromkeys(paths) if path in known]


@contextmanager
def tapped(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Path -> (input, output) of these layers at their latest call, float32, filled while the model runs within."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(path: str):
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[path] = (inputs[0].float(), output.float().clone())  # an activation may follow in place

        return hook

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def answers(ctx: MergeContext, query: str, model: nn.Module) -> dict[str, list[Tensor]]:
    """What a model's heads give on `HEAD_FRAMES` of the query's train frames, as plain values; that is work."""
    data, seen = ctx.train[query], dict[str, list[Tensor]]()
    indices = torch.linspace(0, len(data) - 1, min(HEAD_FRAMES, len(data))).long().tolist()
    handles, was_training = [], model.training
    for path in watched_layers(ctx.queries[query], model):
        own = seen.setdefault(path, [])
        note = model.get_submodule(path).register_forward_hook(lambda _, __, output, own=own: own.append(output))
        handles.append(note)
    try:
        model.eval()(data.frames(indices, ctx.device))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    ctx.flops.add(ctx.queries[query], len(indices))
    return seen


def distance(mine: Answers, theirs: Answers) -> float:
    """Mean over the heads: the mean squared difference of what they gave over the variance of `theirs`.

    0 where there is no head. Channel by channel: what goes into heads keeps its order; for other layers there is
    `merger.mending.similarity.parted`. `theirs` may lie on another device, as after an interruption.
    """
    found = list[float]()
    for path, calls in theirs.items():
        wrong = whole = 0.0
        for one, other in zip(mine[path], calls):
            other = other.to(one.device)
            wrong += float((one - other).square().sum())
            whole += float((other - other.mean()).square().sum())
        found.append(wrong / max(whole, MIN_VARIANCE))
    return sum(found) / max(1, len(found))
