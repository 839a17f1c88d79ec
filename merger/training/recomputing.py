"""Gradient checkpointing: of stretches of a model what goes in is kept, and what lies within is computed once more.

What comes out, and every gradient, is what it would have been: random numbers are drawn again as they were, and norms
take no notice of the second time (Chen et al., Training deep nets with sublinear memory cost, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint


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
