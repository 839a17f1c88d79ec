"""Outputs of imported networks that need no decoder: logits of pixels, vectors, and tensors of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.decoders.classifier import LEAST
from models.decoders.registry import GraphHead
from models.errors import InputError
from models.tasks import task_of

DECODED_TASKS = ("detection", "classification", "keypoints")
"""The tasks whose outputs a decoder explains."""
HINTS = {
    "segmentation": "name all classes in `classes`, with the background; export logits, not numbers of classes",
    "embedding": "name the task `tensor` for other outputs",
}


@dataclass(frozen=True)
class RawOutputs:
    """Which output counts (None: all), and the last `activation` in the graph where these are scores of classes.

    `is_flat`: its maps of one pixel are vectors. `is_single`: one channel is the odds of the second class of two.
    """

    index: int | None = None
    activation: str = ""
    is_flat: bool = False
    is_single: bool = False
    name: str = "outputs"

    def choose(self, outputs: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Of all outputs what the task is about; scores as logits."""
        if self.index is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        found = outputs[self.index]
        if self.is_flat:
            return found.flatten(1)
        if self.activation == "Softmax":
            found = found.clamp_min(LEAST).log()
        elif self.activation == "Sigmoid":
            found = torch.logit(found, LEAST)
        return torch.cat([torch.zeros_like(found), found], dim=1) if self.is_single else found


def find_outputs(head: GraphHead, task: str, width: int, where: str | Path) -> RawOutputs:
    """The first output that fits a task without a decoder, for so many classes; InputError where none does."""
    shapes = [(1, *output.shape) for output in head.outputs]
    if task == "tensor" and shapes:
        return RawOutputs()
    for index, (output, shape) in enumerate(zip(head.outputs, shapes, strict=True)):
        is_flat = task == "embedding" and len(shape) == 4 and shape[2:] == (1, 1)
        is_single = task == "segmentation" and width == 2 and len(shape) == 4 and shape[1] == 1
        if is_flat or is_single or not task_of(task).find_misfit([shape], width):
            last = [name for name in ("Softmax", "Sigmoid") if name in output.tail and task == "segmentation"]
            return RawOutputs(index, (last or [""])[0], is_flat, is_single)
    problem = task_of(task).find_misfit(shapes, width) or f"has no output for {task}"
    raise InputError(where, problem, HINTS.get(task, f"take a model of the zoo for {task}, or the task tensor"), "task")
