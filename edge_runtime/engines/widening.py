"""Weights that lie narrow in the arena, widened layer by layer into one scratch buffer just before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from edge_runtime.engines.base import TensorOf, Wait
from models.bundle import BundleQuery
from models.low_rank import READS_WEIGHTS
from models.narrow import WIDE, widen

ALIGNMENT = 16
"""Floats: what is widened begins at multiples of 64 bytes, as memory that torch allocates itself does."""


@dataclass(eq=False)
class _Part:
    """One narrow tensor: the place that takes what it is widened to, `start` floats into its layer's scratch."""

    where: dict[str, Any]
    attribute: str
    shape: tuple[int, ...]
    name: str
    scale: str | None
    start: int
    stored: Tensor | None = None
    factor: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.scale is None else (self.name, self.scale)


@dataclass(eq=False)
class _Layer:
    """The narrow tensors that are widened together, before `module` is called, `begin` floats into the scratch."""

    module: nn.Module
    begin: int = 0
    floats: int = 0
    parts: list[_Part] = field(default_factory=list)

    def add(self, module: nn.Module, attribute: str, name: str, scale: str | None) -> None:
        where: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
        shape = tuple(where[attribute].shape)
        self.parts.append(_Part(where, attribute, shape, name, scale, self.floats))
        self.floats += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


class Widening:
    """The narrow tensors of one query's module, whose places are empty (on the meta device) between runs.

    `bytes` of scratch are taken for the time of a run: the most that is in use at once. A layer that is called again
    before another one took its memory is not widened again.
    """

    def __init__(self, model: nn.Module, query: BundleQuery) -> None:
        self._layers = _layers(model, query)
        floats = max((layer.begin + layer.floats for layer in self._layers), default=0)
        self.bytes = floats * WIDE.itemsize
        self._empty = [(part, part.where[part.attribute]) for layer in self._layers for part in layer.parts]
        self._scratch: Tensor | None = None
        self._there: dict[_Layer, None] = {}
        self._wait: Wait | None = None
        for layer in self._layers:
            layer.module.register_forward_pre_hook(self._before(layer))

    def bind(self, tensor_of: TensorOf, wait: Wait | None) -> None:
        """As `Engine.bind`."""
        for part, _ in self._empty:
            part.stored = tensor_of(part.name)
            part.factor = None if part.scale is None else tensor_of(part.scale)
        self._wait = wait

    def unbind(self) -> None:
        """As `Engine.unbind`."""
        for part, _ in self._empty:
            part.stored = part.factor = None

    @contextmanager
    def scratch(self, device: torch.device) -> Iterator[None]:
        """The module can run while this lasts."""
        self._scratch = torch.empty(self.bytes // WIDE.itemsize, device=device) if self._layers else None
        try:
            yield
        finally:
            for part, placeholder in self._empty:
                part.where[part.attribute] = placeholder
            self._scratch = None
            self._there.clear()

    def _before(self, layer: _Layer) -> Callable[..., None]:
        names = [name for part in layer.parts for name in part.names]

        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._scratch is None or layer in self._there:
                return
            if self._wait is not None:
                self._wait(names)
            end = layer.begin + layer.floats
            for other in [one for one in self._there if one.begin < end and layer.begin < one.begin + one.floats]:
                del self._there[other]
            for part in layer.parts:
                assert part.stored is not None, "bind comes before a run"
                # In the order in which the arena holds it: an engine that asks for channels last gets that.
                place = self._scratch.as_strided(part.shape, part.stored.stride(), layer.begin + part.start)
                part.where[part.attribute] = widen(part.stored, part.factor, place)
            self._there[layer] = None

        return hook


def _layers(model: nn.Module, query: BundleQuery) -> list[_Layer]:
    """Each narrow tensor with the module that is called nearest above its use.

    Some modules read the weights of their children without calling them (attention does): these are the parent's.
    Memory of a module is in use until it returns, so what is called within it lies behind it.
    """
    if not query.stored:
        return []
    called = _called(model, query.input_size)
    state, layers = query.state(), dict[str, _Layer]()
    for key, own in query.stored.items():
        owner, _, attribute = key.rpartition(".")
        above = owner
        while above and above not in called:
            above = above.rpartition(".")[0]
        layer = layers.setdefault(above, _Layer(model.get_submodule(above)))
        layer.add(model.get_submodule(owner), attribute, state[key], own.scale)
    for path, layer in sorted(layers.items()):
        layer.begin = sum(other.floats for outer, other in layers.items() if _within(path, outer))
    return list(layers.values())


def _within(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


@torch.no_grad()
def _called(model: nn.Module, input_size: int) -> set[str]:
    """The paths of the modules that one run calls; nothing is computed."""
    seen: set[str] = set()

    def note(path: str) -> Callable[..., None]:
        return lambda _module, _inputs: seen.add(path)

    hooks = [module.register_forward_pre_hook(note(path)) for path, module in model.named_modules()]
    try:
        model(torch.empty(1, 3, input_size, input_size, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    readers = [path for path, module in model.named_modules() if isinstance(module, READS_WEIGHTS)]
    return {path for path in seen if not any(_within(path, reader) for reader in readers)}
