"""How a step of training is laid out so that it fits a card: tried at the start, and changed when memory is full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from merger.journal.progress import Progress, silent
from merger.training.recipe import Recipe
from models.data import PreparedFrames
from models.device import empty_caches, is_out_of_memory
from models.errors import InputError

STEPS = 2
"""Steps that are tried: AdamW's moments are there from the second on."""
REMEDY = "give smaller inputs or models, or merge in several processes with torchrun"


@dataclass(frozen=True)
class Layout:
    """The frames of a node, whether train frames lie on the card, and whether intermediates are computed again."""

    node: int
    on_card: bool
    recompute: bool

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe as it is carried out so; with smaller nodes a batch is as large as it was."""
        node = min(recipe.node, self.node)
        while recipe.batch > node and recipe.batch % node:
            node -= 1
        return replace(recipe, node=node, recompute=recipe.recompute or self.recompute)

    def trial(self, recipe: Recipe) -> Recipe:
        """The few steps that show whether it fits."""
        return replace(self.recipe(recipe), epochs=1, frames_per_epoch=STEPS * recipe.batch)

    def place(self, sets: Iterable[PreparedFrames], card: torch.device) -> bool:
        """Put the train frames where they belong; whether there was room."""
        where = card if self.on_card else torch.device("cpu")
        found = [prepared.keep_on(where) for prepared in sets]
        return all(found)

    def next(self) -> Layout | None:
        """The one that takes less memory; smaller nodes come last, since norms take the statistics of a node."""
        if self.on_card:
            return replace(self, on_card=False)
        if not self.recompute:
            return replace(self, recompute=True)
        return None if self.node % 2 else replace(self, node=self.node // 2)

    def __str__(self) -> str:
        frames = "on the card" if self.on_card else "in the processor's memory"
        again = ", intermediates computed again in the backward pass" if self.recompute else ""
        return f"{self.node} frames at once, train frames {frames}{again}"


def layouts(recipe: Recipe) -> list[Layout]:
    """All layouts, the fastest first."""

    def from_here(layout: Layout | None) -> Iterator[Layout]:
        while layout is not None:
            yield layout
            layout = layout.next()

    return list(from_here(Layout(min(recipe.node, recipe.batch), True, False)))


def first_that_fits(tried: Sequence[Layout], attempt: Callable[[Layout], bool]) -> int:
    """The index of the first with which some steps succeed; InputError where not even the last one does.

    `attempt` takes these steps, and returns False or raises what memory that is full raises.
    """
    for index, layout in enumerate(tried):
        try:
            if attempt(layout):
                return index
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        empty_caches()
    raise InputError("the card", f"is full with {tried[-1]}", REMEDY)


class Fitting:
    """How the steps of a merge are laid out from now on: as was tried at the start, and for less where that was needed.

    `known` is what was found before, and takes up what is found. Train frames lie in the processor's memory, unless
    something else was found to fit.
    """

    def __init__(self, known: MutableMapping[str, Any] | None = None, progress: Progress = silent) -> None:
        self._known, self._progress = {} if known is None else known, progress

    @property
    def layout(self) -> Layout | None:
        """What was found; None where nothing had to be."""
        return Layout(**self._known) if self._known else None

    def take(self, layout: Layout) -> None:
        """Lay out all that comes so."""
        self._known.update(asdict(layout))

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe as it is carried out."""
        return self.layout.recipe(recipe) if self.layout else recipe

    def next(self, recipe: Recipe) -> Layout:
        """What comes when the memory is full with what was found for this recipe; one line says so. InputError where
        nothing takes less.
        """
        node = min(recipe.node, recipe.batch)
        now = replace(self.layout, node=node) if self.layout else Layout(node, False, recipe.recompute)
        found = now.next()
        if found is None:
            remedy = f"free some and go on with --resume, or {REMEDY}"
            raise InputError("the memory", f"is full in the middle of training, with {now}", remedy)
        self.take(found)
        self._progress("warning", text=f"memory is full with {now}; this step is taken again with {found}")
        return found

    def agree(self, others: Iterable[Mapping[str, Any]]) -> None:
        """Lay steps out as the one of several processes for which least memory is left, so that all do the same."""
        found = [Layout(**one) for one in others if one]
        if found:
            self.take(min(found, key=lambda one: (one.on_card, not one.recompute, one.node)))

    def to_plain(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return dict(self._known)


class Undo:
    """What a step changes before its gradients are there: the buffers of its models, running statistics above all.

    Weights change at the end of a step only, and random numbers are a function of its number.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        kinds = defaultdict[object, dict[int, Tensor]](dict)
        for buffer in (buffer for model in models for buffer in model.buffers()):
            kinds[buffer.dtype, buffer.device][id(buffer)] = buffer
        self._buffers = [list(found.values()) for found in kinds.values()]
        self._before = [[torch.empty_like(buffer) for buffer in buffers] for buffers in self._buffers]

    def note(self) -> None:
        """A step begins: this is how things are."""
        self._copy(self._buffers, self._before)

    def back(self) -> None:
        """Let things be as they were noted last."""
        self._copy(self._before, self._buffers)

    @torch.no_grad()
    def _copy(self, those: Sequence[Sequence[Tensor]], to: Sequence[Sequence[Tensor]]) -> None:
        for values, places in zip(those, to):
            torch._foreach_copy_(list(places), list(values))  # pyright: ignore[reportPrivateImportUsage]
