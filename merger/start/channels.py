"""Which channels of a network must be permuted together, found from its graph.

A convolution or linear layer makes a new space of channels; elementwise operations, norms and pooling pass it on,
sums tie two spaces into one, concatenations put them side by side, depthwise convolutions keep their input's, and a
flattened map has every channel once per position. Reordering a space in all tensors that use it leaves what the
network computes as it was. What this reading of the graph does not understand keeps its order, and so does what
comes in and what goes out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

UNKNOWN = 0
"""The repeat of a flattened part before a layer's width tells it."""
BACKBONE = "backbone"
"""The part of a detector that can be traced where the whole cannot: its heads and its choices stay as they are."""


@dataclass(frozen=True)
class Part:
    """A whole space of `width` channels within an axis, each channel `repeat` times in a row."""

    space: int
    width: int
    repeat: int = 1


Layout = tuple[Part, ...]
"""The channels of an axis from first to last; None in its place: a fixed order."""


@dataclass(frozen=True)
class Channels:
    """The free spaces of one model: space -> width, and (state dict key, axis) -> the layout of that axis."""

    widths: Mapping[int, int]
    uses: Mapping[tuple[str, int], Layout]

    def free_in(self, key: str, axis: int) -> list[tuple[int, Part]]:
        """Every free part of an axis with the place where it begins."""
        found, start = [], 0
        for part in self.uses.get((key, axis), ()):
            if part.space in self.widths:
                found.append((start, part))
            start += part.width * part.repeat
        return found


def channels_of(model: nn.Module) -> Channels | None:
    """The spaces of a model, of its backbone where only that can be traced; None where nothing can be."""
    if len({id(tensor) for tensor in model.state_dict(keep_vars=True).values()}) < len(model.state_dict()):
        return None  # a tensor under two names
    backbone = getattr(model, BACKBONE, None)
    for part, prefix in ((model, ""), (backbone, f"{BACKBONE}.")):
        if isinstance(part, nn.Module):
            try:
                graph = fx.Tracer().trace(part)
            except Exception:  # tracing runs the model's own code, which can fail on proxies in any way
                continue
            return _Reader(part, prefix).read(graph)
    return None


@torch.no_grad()
def permuted(state: Mapping[str, Tensor], channels: Channels, orders: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The state after reordering: channel i of a space is the one that was channel `orders[space][i]` before."""
    changed = dict(state)
    for (key, axis), layout in channels.uses.items():
        if any(part.space in orders for part in layout):
            index = torch.cat(list(_indices(layout, orders)))
            changed[key] = changed[key].index_select(axis, index.to(changed[key].device))
    return changed


def _indices(layout: Layout, orders: Mapping[int, Tensor]) -> Iterator[Tensor]:
    start = 0
    for part in layout:
        order = orders.get(part.space, torch.arange(part.width))
        yield start + (order[:, None] * part.repeat + torch.arange(part.repeat)).flatten()
        start += part.width * part.repeat


PASSING_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.ZeroPad2d,
)  # fmt: skip
PASSING_FUNCTIONS = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.sigmoid, F.tanh, F.hardswish, F.hardsigmoid, F.dropout),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate),
    *(torch.relu, torch.sigmoid, torch.tanh),
}
PASSING_NAMES = {"stochastic_depth", "boolean_dispatch", "max_pool2d"}
"""Functions known by name: torchvision's, and torch's that stand for several."""
PASSING_METHODS = {"relu", "sigmoid", "tanh", "contiguous", "clone"}
JOINING = {operator.add, operator.mul, operator.iadd, operator.imul, torch.add, torch.mul, "add", "mul", "add_", "mul_"}
SHAPE_METHODS = {"size", "dim", "numel"}


class _Reader:
    """Walks the graph once; `spaces` is a forest in which tied spaces have one root."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self.model, self.prefix = model, prefix
        self.spaces: list[int] = []
        self.widths: list[int] = []
        self.fixed: list[bool] = []
        self.made: dict[str, int] = {}
        self.uses: dict[tuple[str, int], Layout | None] = {}
        self.layouts: dict[fx.Node, Layout | None] = {}

    def read(self, graph: fx.Graph) -> Channels:
        for node in graph.nodes:
            self.layouts[node] = self._node(node)
        free = {self._root(space) for space in range(len(self.spaces)) if not self.fixed[self._root(space)]}
        uses = {
            (self.prefix + key, axis): tuple(Part(self._root(p.space), p.width, p.repeat) for p in layout)
            for (key, axis), layout in self.uses.items()
            if layout is not None
        }
        used = {part.space for layout in uses.values() for part in layout}
        return Channels({space: self.widths[space] for space in sorted(free & used)}, uses)

    def _node(self, node: fx.Node) -> Layout | None:
        inputs = [self.layouts[one] for one in node.all_input_nodes]
        first = self.layouts.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.op == "call_module":
            return self._module(str(node.target), first, inputs)
        if node.op == "call_function":
            target: Any = node.target
            if target is getattr:
                return None if node.args[1] == "shape" else self._unknown(inputs)
            if target in PASSING_FUNCTIONS or getattr(target, "__name__", "") in PASSING_NAMES:
                return first
            if target is operator.getitem:
                return first if _keeps_channels(node.args[1]) else self._unknown(inputs)
            if target in (torch.cat, torch.concat):
                return self._concatenated(node, inputs)
            return self._shaped(node, target, first, inputs)
        if node.op == "call_method":
            if node.target in SHAPE_METHODS:
                return None
            return first if node.target in PASSING_METHODS else self._shaped(node, node.target, first, inputs)
        return self._unknown(inputs)  # what comes in, plain parameters, and what goes out

    def _shaped(self, node: fx.Node, target: Any, first: Layout | None, inputs: list[Layout | None]) -> Layout | None:
        if target in JOINING:
            tensors = [self.layouts[one] for one in node.args[:2] if isinstance(one, fx.Node)]
            return self._joined(tensors)
        arguments = (*node.args[1:], *node.kwargs.values())
        if target in (torch.flatten, "flatten"):
            return self._flattened(first) if arguments in ((1,), (1, -1)) else self._unknown(inputs)
        if target in ("view", "reshape"):
            return self._flattened(first) if len(arguments) == 2 and arguments[1] == -1 else self._unknown(inputs)
        if target in (torch.mean, "mean"):
            axes = arguments[0] if arguments and isinstance(arguments[0], (list, tuple)) else ()
            if set(axes) not in ({2, 3}, {-1, -2}):
                return self._unknown(inputs)
            return first if True in arguments[1:] else self._flattened(first)  # True: the axes stay
        return self._unknown(inputs)

    def _module(self, path: str, layout: Layout | None, inputs: list[Layout | None]) -> Layout | None:
        module: Any = self.model.get_submodule(path)
        if getattr(module, "weight", None) is not module._parameters.get("weight"):
            return self._unknown(inputs)  # computed from other tensors, as by weight norm
        if isinstance(module, nn.Conv2d):
            if module.groups == 1:
                return self._layer(path, module, self._settled(layout, module.in_channels), module.out_channels)
            depthwise = module.groups == module.in_channels == module.out_channels
            layout = self._settled(layout, module.in_channels) if depthwise else self._unknown([layout])
            return self._along(path, module, layout, ("weight", "bias")) if depthwise else None
        if isinstance(module, nn.Linear):
            if layout is not None and any(part.repeat != UNKNOWN for part in layout):
                layout = self._unknown([layout])  # it works on the last axis of a map, which is none of channels
            layer = self._layer(path, module, self._settled(layout, module.in_features), module.out_features)
            return _with_repeat(layer, UNKNOWN)
        if isinstance(module, _BatchNorm):
            names = ("weight", "bias", "running_mean", "running_var")
            return self._along(path, module, self._settled(layout, module.num_features), names)
        if isinstance(module, nn.Flatten):
            plain = (module.start_dim, module.end_dim) == (1, -1)
            return self._flattened(layout) if plain else self._unknown(inputs)
        return layout if isinstance(module, PASSING_MODULES) else self._unknown(inputs)

    def _layer(self, path: str, module: nn.Module, layout: Layout | None, width: int) -> Layout:
        """A weight takes its input's layout on axis 1 and makes a new space on axis 0."""
        self._use(f"{path}.weight", 1, layout)
        if path not in self.made:
            self.made[path] = self._new(width)
        made = (Part(self.made[path], width),)
        self._along(path, module, made, ("weight", "bias"))
        return made

    def _along(self, path: str, module: nn.Module, layout: Layout | None, names: tuple[str, ...]) -> Layout | None:
        for name in names:
            if getattr(module, name) is not None:
                self._use(f"{path}.{name}", 0, layout)
        return layout

    def _use(self, key: str, axis: int, layout: Layout | None) -> None:
        known = self.uses.setdefault((key, axis), layout)
        if known != layout:  # a layer that is used twice
            self._joined([known, layout])

    def _settled(self, layout: Layout | None, width: int) -> Layout | None:
        """The layout with the repeats of flattened parts, which an axis of this width tells."""
        if layout is None or all(part.repeat != UNKNOWN for part in layout):
            return layout
        total = sum(part.width for part in layout)
        if width % total:
            return self._unknown([layout])
        return _with_repeat(layout, width // total)

    def _flattened(self, layout: Layout | None) -> Layout | None:
        """Channel by channel, all positions of each; what was flat before may have its channels on another axis."""
        if layout is None or any(part.repeat == UNKNOWN for part in layout):
            return self._unknown([layout])
        return _with_repeat(layout, UNKNOWN)

    def _concatenated(self, node: fx.Node, inputs: list[Layout | None]) -> Layout | None:
        axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        parts: Any = node.args[0] if node.args else None
        listed = isinstance(parts, (list, tuple)) and all(isinstance(part, fx.Node) for part in parts)
        layouts = [self.layouts[part] for part in parts] if listed else [None]
        if axis != 1 or any(layout is None or any(p.repeat != 1 for p in layout) for layout in layouts):
            return self._unknown(inputs)
        return tuple(part for layout in layouts for part in layout or ())

    def _joined(self, layouts: list[Layout | None]) -> Layout | None:
        """The layout of a sum or product: all of them made one, part by part; fixed where that cannot be."""
        first = layouts[0] if layouts else None
        shapes = {tuple((p.width, p.repeat) for p in layout) if layout else None for layout in layouts}
        if first is None or len(shapes) > 1:
            return self._unknown(layouts)
        for layout in layouts[1:]:
            for one, other in zip(first, layout or ()):
                self._tie(one.space, other.space)
        return first

    def _unknown(self, layouts: list[Layout | None]) -> None:
        for layout in layouts:
            for part in layout or ():
                self.fixed[self._root(part.space)] = True

    def _new(self, width: int) -> int:
        self.spaces.append(len(self.spaces))
        self.widths.append(width)
        self.fixed.append(False)
        return self.spaces[-1]

    def _root(self, space: int) -> int:
        while self.spaces[space] != space:
            space = self.spaces[space]
        return space

    def _tie(self, one: int, other: int) -> None:
        one, other = self._root(one), self._root(other)
        self.spaces[other] = one
        self.fixed[one] = self.fixed[one] or self.fixed[other]


def _with_repeat(layout: Layout, repeat: int) -> Layout:
    return tuple(Part(part.space, part.width, repeat) for part in layout)


def _keeps_channels(index: Any) -> bool:
    """Whether x[index] cuts only along height and width."""
    whole = slice(None)
    return isinstance(index, tuple) and len(index) > 2 and index[:2] == (whole, whole)
