"""What layers see on a few frames: the frames, and the inputs and outputs of some layers of a model on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from merger.bench.workbench import Workbench


def raw_frames(bench: Workbench, query: str, count: int) -> list[np.ndarray]:
    """So many train frames of a query, spread evenly over its split and as they were decoded."""
    frames = bench.train[query].prepared.split.frames
    indices = torch.linspace(0, len(frames) - 1, min(count, len(frames))).long().tolist()
    return [frames[index] for index in indices]


def as_input(bench: Workbench, query: str, frames: Iterable[np.ndarray]) -> Tensor:
    """Frames of whatever query as this query's model takes them, f32 (N, 3, S, S)."""
    preprocess = bench.train[query].preprocess
    return preprocess.normalise(torch.stack([preprocess.resize(frame) for frame in frames])).to(bench.device)


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
