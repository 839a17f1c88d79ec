"""How a step of training is laid out so that it fits a card: tried at the start, before anything depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from merger.training.loop import Recipe, TrainingSet
from models.errors import InputError

STEPS = 2
"""Steps that are tried: AdamW's moments are there from the second on."""


@dataclass(frozen=True)
class Layout:
    """The frames of a node, whether train frames lie on the card, and whether intermediates are computed again."""

    node: int
    on_card: bool
    recompute: bool

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe as it is carried out so; with smaller nodes a batch is as large as it was."""
        return replace(recipe, node=min(recipe.node, self.node), recompute=self.recompute)

    def trial(self, recipe: Recipe) -> Recipe:
        """The few steps that show whether it fits."""
        return replace(self.recipe(recipe), epochs=1, frames_per_epoch=STEPS * recipe.batch)

    def place(self, sets: Iterable[TrainingSet], card: torch.device) -> bool:
        """Put the train frames where they belong; whether there was room."""
        where = card if self.on_card else torch.device("cpu")
        found = [data.prepared.keep_on(where) for data in sets]
        return all(found)

    def __str__(self) -> str:
        frames = "on the card" if self.on_card else "in the processor's memory"
        again = ", intermediates computed again in the backward pass" if self.recompute else ""
        return f"{self.node} frames at once, train frames {frames}{again}"


def layouts(recipe: Recipe) -> list[Layout]:
    """All layouts, the fastest first; smaller nodes come last, since norms take the statistics of a node."""
    node = min(recipe.node, recipe.batch)
    found = [Layout(node, True, False), Layout(node, False, False), Layout(node, False, True)]
    while not node % 2:
        node //= 2
        found.append(Layout(node, False, True))
    return found


def first_that_fits(tried: Sequence[Layout], attempt: Callable[[Layout], bool]) -> int:
    """The index of the first with which some steps succeed; InputError where not even the last one does.

    `attempt` takes these steps, and returns False or raises OutOfMemoryError where memory is not enough.
    """
    for index, layout in enumerate(tried):
        try:
            if attempt(layout):
                return index
        except torch.OutOfMemoryError:
            pass
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    remedy = "give smaller inputs or models, or merge in several processes with torchrun"
    raise InputError("the card", f"is full with {tried[-1]}", remedy)
