"""How a step of training is laid out so that it fits a card: tried at the start, and changed when memory is full.

Gradient checkpointing: of stretches of a model what goes in is kept, and what lies within is computed once more.

What comes out, and every gradient, is what it would have been: random numbers are drawn again as they were, and norms
take no notice of the second time (Chen et al., Training deep nets with sublinear memory cost, 2016).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from merger.events import Progress, silent
from merger.training.recipe import Recipe
from models.data import PreparedFrames
from models.device import empty_caches, is_out_of_memory
from models.errors import InputError

STEPS = 2
"""Steps that are tried: AdamW's moments are there from the second on."""
REMEDY = "give smaller inputs or models, or merge in several processes with torchrun"


@dataclass(frozen=True)
class StepConfig:
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

    def next(self) -> StepConfig | None:
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


def layouts(recipe: Recipe) -> list[StepConfig]:
    """All layouts, the fastest first."""

    def from_here(layout: StepConfig | None) -> Iterator[StepConfig]:
        while layout is not None:
            yield layout
            layout = layout.next()

    return list(from_here(StepConfig(min(recipe.node, recipe.batch), True, False)))


def first_that_fits(tried: Sequence[StepConfig], attempt: Callable[[StepConfig], bool]) -> int:
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


class MemoryPlan:
    """How the steps of a merge are laid out from now on: as was tried at the start, and for less where that was needed.

    `known` is what was found before, and takes up what is found. Train frames lie in the processor's memory, unless
    something else was found to fit.
    """

    def __init__(self, known: MutableMapping[str, Any] | None = None, progress: Progress = silent) -> None:
        self._known, self._progress = {} if known is None else known, progress

    @property
    def layout(self) -> StepConfig | None:
        """What was found; None where nothing had to be."""
        return StepConfig(**self._known) if self._known else None

    def take(self, layout: StepConfig) -> None:
        """Lay out all that comes so."""
        self._known.update(asdict(layout))

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe as it is carried out."""
        return self.layout.recipe(recipe) if self.layout else recipe

    def next(self, recipe: Recipe) -> StepConfig:
        """What comes when the memory is full with what was found for this recipe; one line says so. InputError where
        nothing takes less.
        """
        node = min(recipe.node, recipe.batch)
        now = replace(self.layout, node=node) if self.layout else StepConfig(node, False, recipe.recompute)
        found = now.next()
        if found is None:
            remedy = f"free some and go on with --resume, or {REMEDY}"
            raise InputError("the memory", f"is full in the middle of training, with {now}", remedy)
        self.take(found)
        self._progress("warning", text=f"memory is full with {now}; this step is taken again with {found}")
        return found

    def agree(self, others: Iterable[Mapping[str, Any]]) -> None:
        """Lay steps out as the one of several processes for which least memory is left, so that all do the same."""
        found = [StepConfig(**one) for one in others if one]
        if found:
            self.take(min(found, key=lambda one: (one.on_card, not one.recompute, one.node)))

    def to_plain(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return dict(self._known)


class StepRollback:
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


@contextmanager
def recomputed(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Within, a forward pass of the model keeps less for the backward pass, which then takes one more forward pass.

    Stretches have about the root of the model's layers each: whole parts of it, or runs of a sequence.
    """
    changed: list[tuple[nn.Module, Any]] = []
    most = max(2, math.ceil(math.sqrt(_layers(model))))
    try:
        for part, forward in _shortened(model, most) if wanted else ():
            changed.append((part, part.__dict__.get("forward")))
            part.forward = forward
        yield
    finally:
        for part, before in changed:
            del part.forward
            if before is not None:
                part.forward = before


def _shortened(part: nn.Module, most: int) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Parts of a module and the forward of each in which no stretch has more than so many layers."""
    if _layers(part) <= most:
        if _layers(part) > 1 and not _in_place(part):
            yield part, partial(_kept_short, [part], part.forward)
        return
    if type(part).forward is nn.Sequential.forward:
        yield part, partial(_in_turn, [_shortened_run(run, most) for run in _runs(list(part.children()), most)])
    for child in part.children():
        if _layers(child) > most or type(part).forward is not nn.Sequential.forward:
            yield from _shortened(child, most)


def _shortened_run(run: Sequence[nn.Module], most: int) -> Callable[[Any], Any]:
    """What runs in turn, as a stretch; a part that is larger than one has stretches of its own.

    What goes into a stretch is kept, so one that begins by changing that runs plainly.
    """
    plain = any(_layers(part) > most for part in run) or _in_place(run[0])
    return partial(_in_turn, run) if plain else partial(_kept_short, run, partial(_in_turn, run))


def _runs(parts: Sequence[nn.Module], most: int) -> list[list[nn.Module]]:
    """Parts of a sequence in runs of at most so many layers, where none is larger alone.

    What changes its input in place goes with what made that: what goes into a run is kept, and must stay as it was.
    """
    runs: list[list[nn.Module]] = []
    for part in parts:
        full = not runs or sum(map(_layers, [*runs[-1], part])) > most
        if not runs or (full and not _in_place(part)):
            runs.append([])
        runs[-1].append(part)
    return runs


def _kept_short(parts: Sequence[nn.Module], forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if sum(map(_layers, parts)) < 2:
        return forward(*given, **named)
    given = tree_map(lambda one: one, given)  # lists may be added to before they are asked for again
    return checkpoint(forward, *given, use_reentrant=False, context_fn=partial(_twice, parts), **named)


def _in_turn(parts: Sequence[Callable[[Any], Any]], given: Any) -> Any:
    for part in parts:
        given = part(given)
    return given


def _twice(parts: Sequence[nn.Module]) -> tuple[AbstractContextManager, AbstractContextManager]:
    """What surrounds the first time that something is computed, and the second."""
    return nullcontext(), _without_notice(parts)


@contextmanager
def _without_notice(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within, buffers change in copies: running statistics have seen these frames already."""
    owners = [owner for part in parts for owner in part.modules() if owner._buffers]
    before = [owner._buffers for owner in owners]
    for owner in owners:
        owner._buffers = {name: None if one is None else one.clone() for name, one in owner._buffers.items()}
    try:
        yield
    finally:
        for owner, own in zip(owners, before):
            owner._buffers = own


def _layers(module: nn.Module) -> int:
    """How many parts it has that have none themselves."""
    return sum(not part._modules for part in module.modules())


def _in_place(module: nn.Module) -> bool:
    """Whether the first thing it does changes its input."""
    first = next((part for part in module.modules() if not part._modules), module)
    return bool(getattr(first, "inplace", False))
