"""Outputs of imported networks that need no decoder: logits of pixels, vectors, and tensors of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemel.models.arrays import Array, library_of
from gemel.models.decoders.classifier import as_logits
from gemel.models.decoders.decoder import GraphHead, Outputs, order_by_weight
from gemel.models.errors import InputError
from gemel.models.tasks import task_of

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

    def answer(self, outputs: Outputs) -> Array | tuple[Array, ...]:
        """Of all outputs what the task is about; scores as logits."""
        if self.index is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        values = outputs[self.index]
        if self.is_flat:
            return values.reshape(len(values), -1)
        values = as_logits(values, self.activation)
        if not self.is_single:
            return values
        library = library_of(values)
        return library.concatenate([library.zeros_like(values), values], 1)


def find_outputs(head: GraphHead, task: str, width: int, where: str | Path) -> RawOutputs:
    """The likeliest output that fits a task without a decoder, for so many classes; InputError where none does."""
    shapes = [(1, *output.shape) for output in head.outputs]
    if task == "tensor" and shapes:
        return RawOutputs()
    for index, output in order_by_weight(enumerate(head.outputs)):
        shape = shapes[index]
        is_flat = task == "embedding" and len(shape) == 4 and shape[2:] == (1, 1)
        is_single = task == "segmentation" and width == 2 and len(shape) == 4 and shape[1] == 1
        if is_flat or is_single or not task_of(task).find_misfit([shape], width):
            last = [
                name
                for name in ("Softmax", "Sigmoid")
                if name in output.tail and task == "segmentation"
            ]
            return RawOutputs(index, (last or [""])[0], is_flat, is_single)
    problem = task_of(task).find_misfit(shapes, width) or f"has no output for {task}"
    raise InputError(
        where,
        problem,
        HINTS.get(task, f"take a model of the zoo for {task}, or the task tensor"),
        "task",
    )
