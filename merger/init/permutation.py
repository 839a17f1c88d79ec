"""Channel permutations: matching the channels of independently trained networks before their weights are tied.

Two networks that learned the same function keep their channels in different orders (Ainsworth, Hayase and Srinivasa,
Git Re-Basin, ICLR 2023). Channels are matched by the correlation of their activations on the same frames (Li et al.,
Convergent Learning, 2015), not by their weights: norms are private and may scale and shift each channel, which
correlation ignores. Every space of channels is matched on its own, over all tied layers that read or write it.

Which axes are permuted together is read from the graph: a convolution or linear layer makes a new space of channels;
elementwise operations, norms and pooling keep it, sums tie two spaces, concatenations put them side by side,
depthwise convolutions keep their input's, and a flattened map has every channel once per position. Channels of
operations that this reading does not know, and those of the network's inputs and outputs, keep their order.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from merger.checkpoint import State, Step, StepCache
from merger.config import MEASUREMENT
from merger.context import MergeContext
from merger.evaluate import as_input, module_paths, raw_frames, record_layers
from merger.events import Event
from merger.init.average import rank_donors
from merger.training.distillation import watched_layers
from models.device import disable_tf32
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan

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
def permute_channels(
    state: Mapping[str, Tensor], channels: Channels, orders: Mapping[int, Tensor]
) -> dict[str, Tensor]:
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
                return self._concatenate(node, inputs)
            return self._shape_layout(node, target, first, inputs)
        if node.op == "call_method":
            if node.target in SHAPE_METHODS:
                return None
            return first if node.target in PASSING_METHODS else self._shape_layout(node, node.target, first, inputs)
        return self._unknown(inputs)  # what comes in, plain parameters, and what goes out

    def _shape_layout(
        self, node: fx.Node, target: Any, first: Layout | None, inputs: list[Layout | None]
    ) -> Layout | None:
        if target in JOINING:
            tensors = [self.layouts[one] for one in node.args[:2] if isinstance(one, fx.Node)]
            return self._join(tensors)
        arguments = (*node.args[1:], *node.kwargs.values())
        if target in (torch.flatten, "flatten"):
            return self._flatten(first) if arguments in ((1,), (1, -1)) else self._unknown(inputs)
        if target in ("view", "reshape"):
            return self._flatten(first) if len(arguments) == 2 and arguments[1] == -1 else self._unknown(inputs)
        if target in (torch.mean, "mean"):
            axes = arguments[0] if arguments and isinstance(arguments[0], (list, tuple)) else ()
            if set(axes) not in ({2, 3}, {-1, -2}):
                return self._unknown(inputs)
            return first if True in arguments[1:] else self._flatten(first)  # True: the axes stay
        return self._unknown(inputs)

    def _module(self, path: str, layout: Layout | None, inputs: list[Layout | None]) -> Layout | None:
        module: Any = self.model.get_submodule(path)
        if getattr(module, "weight", None) is not module._parameters.get("weight"):
            return self._unknown(inputs)  # computed from other tensors, as by weight norm
        if isinstance(module, nn.Conv2d):
            if module.groups == 1:
                return self._layer(path, module, self._resolve_repeats(layout, module.in_channels), module.out_channels)
            depthwise = module.groups == module.in_channels == module.out_channels
            layout = self._resolve_repeats(layout, module.in_channels) if depthwise else self._unknown([layout])
            return self._along(path, module, layout, ("weight", "bias")) if depthwise else None
        if isinstance(module, nn.Linear):
            if layout is not None and any(part.repeat != UNKNOWN for part in layout):
                layout = self._unknown([layout])  # it works on the last axis of a map, which is none of channels
            layer = self._layer(path, module, self._resolve_repeats(layout, module.in_features), module.out_features)
            return _with_repeat(layer, UNKNOWN)
        if isinstance(module, _BatchNorm):
            names = ("weight", "bias", "running_mean", "running_var")
            return self._along(path, module, self._resolve_repeats(layout, module.num_features), names)
        if isinstance(module, nn.Flatten):
            plain = (module.start_dim, module.end_dim) == (1, -1)
            return self._flatten(layout) if plain else self._unknown(inputs)
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
            self._join([known, layout])

    def _resolve_repeats(self, layout: Layout | None, width: int) -> Layout | None:
        """The layout with the repeats of flattened parts, which an axis of this width tells."""
        if layout is None or all(part.repeat != UNKNOWN for part in layout):
            return layout
        total = sum(part.width for part in layout)
        if width % total:
            return self._unknown([layout])
        return _with_repeat(layout, width // total)

    def _flatten(self, layout: Layout | None) -> Layout | None:
        """Channel by channel, all positions of each; what was flat before may have its channels on another axis."""
        if layout is None or any(part.repeat == UNKNOWN for part in layout):
            return self._unknown([layout])
        return _with_repeat(layout, UNKNOWN)

    def _concatenate(self, node: fx.Node, inputs: list[Layout | None]) -> Layout | None:
        axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        parts: Any = node.args[0] if node.args else None
        listed = isinstance(parts, (list, tuple)) and all(isinstance(part, fx.Node) for part in parts)
        layouts = [self.layouts[part] for part in parts] if listed else [None]
        if axis != 1 or any(layout is None or any(p.repeat != 1 for p in layout) for layout in layouts):
            return self._unknown(inputs)
        return tuple(part for layout in layouts for part in layout or ())

    def _join(self, layouts: list[Layout | None]) -> Layout | None:
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


EPSILON = 1e-6

Orders = Mapping[int, Tensor]


def align_channels(
    ctx: MergeContext, plan: SharingPlan, donor: str, cache: StepCache, states: Mapping[str, State] | None = None
) -> dict[str, State]:
    """Every sharing query's own model with its channels permuted to match the donors'; none changes its outputs.

    The donor comes first, then the queries with the most shared bytes; each is matched with the first of these in
    every set. Starts from `states`, or the originals'. The inputs of the heads keep their order: distillation compares
    them with the originals'. A model whose graph cannot be read keeps its order, and progress says so.
    """
    found = {query: model.state_dict() for query, model in ctx.bases.items()} if states is None else dict(states)
    sharing = rank_donors(plan, ctx.layers)
    done: list[str] = []
    for query in sorted(sharing, key=lambda query: query != donor):
        orders = cache.step(Step.CHANNEL_ORDER, partial(_orders, ctx, plan, query, done, found), query) if done else {}
        if channels := orderable(ctx, query) if orders else None:
            found[query] = permute_channels(found[query], channels, orders)
        done.append(query)
    return found


def orderable(ctx: MergeContext, query: str) -> Channels | None:
    """The spaces of a query's model but those that its heads read; None where its graph cannot be read."""
    model = ctx.bases[query]
    channels = channels_of(model)
    if channels is None:
        return None
    heads = watched_layers(ctx.queries[query], model)
    read = {part.space for head in heads for _, part in channels.free_in(f"{head}.weight", 1)}
    return Channels({space: width for space, width in channels.widths.items() if space not in read}, channels.uses)


def match_channels(scores: Tensor) -> Tensor:
    """The order of the columns' partners: entry i is the row matched with column i, the sum of scores being largest.

    `scores` (C, C): row = own channel, column = the other's. Optimal (Kuhn 1955; Jonker and Volgenant 1987).
    """
    from scipy.optimize import linear_sum_assignment

    _, rows = linear_sum_assignment(scores.T.double().cpu().numpy(), maximize=True)
    return torch.from_numpy(rows.copy()).long()


@torch.no_grad()
def _orders(
    ctx: MergeContext, plan: SharingPlan, query: str, done: Sequence[str], states: Mapping[str, State]
) -> dict[int, Tensor]:
    """Space -> order of its channels that meets those of the models done before."""
    channels = orderable(ctx, query)
    if channels is None:
        ctx.warn(f"{query}: the graph of its model cannot be read, so its channels stay in their order")
        return {}
    pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for members in plan.shared:
        paths = dict(members)
        other = next((one for one in done if one in paths), None)
        if query in paths and other is not None:
            pairs[other].append((paths[query], paths[other]))
    scores = {space: torch.zeros(width, width) for space, width in channels.widths.items()}
    for other, paths in pairs.items():
        for space, correlations in _correlate(ctx, query, other, dict(paths), states, channels):
            scores[space] += correlations.cpu()
    orders = {space: match_channels(score) for space, score in scores.items() if bool(score.any())}
    if not _keeps_outputs(ctx, query, states[query], channels, orders):
        ctx.warn(f"{query}: its model gives other outputs with its channels permuted, so they stay in their order")
        return {}
    moved = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
    ctx.report(Event.ALIGNED, query=query, spaces=len(orders), moved=moved, channels=sum(map(len, orders.values())))
    return orders


def _correlate(
    ctx: MergeContext, query: str, other: str, paths: Mapping[str, str], states: Mapping[str, State], channels: Channels
) -> Iterator[tuple[int, Tensor]]:
    """(space, correlations of its channels with the other's) of every layer's outputs and inputs, on frames of both
    queries; `paths` are the query's layers and the other's."""
    models = ctx.models([query, other], states)
    known = module_paths(models[other].eval(), paths.values())
    mine = [path for path in module_paths(models[query].eval(), paths) if paths[path] in known]
    keys = {path: weight_key(states[query], path) for path in mine}
    spots = [(path, axis, *spot) for path in mine for axis in (0, 1) for spot in channels.free_in(keys[path], axis)]
    moments = [CrossMoments() for _ in spots]
    count = MEASUREMENT.alignment_frames
    frames = [*raw_frames(ctx, query, count), *raw_frames(ctx, other, count)]
    for start in range(0, len(frames), MEASUREMENT.alignment_batch):
        chunk = frames[start : start + MEASUREMENT.alignment_batch]
        with (
            record_layers(models[query], mine) as here,
            record_layers(models[other], [paths[path] for path in mine]) as there,
        ):
            models[query](as_input(ctx, query, chunk))
            models[other](as_input(ctx, other, chunk))
        for (path, axis, begin, part), moment in zip(spots, moments):
            own, its = here[path][1 - axis], there[paths[path]][1 - axis]
            if len(here[path][1]) == len(there[paths[path]][1]):  # else regions of a frame, of which each chose its own
                moment.add(*_samples(own, its, begin, part.width, part.repeat))
    for one in (query, other):
        ctx.flops.add(ctx.queries[one], len(frames))
    return ((part.space, moment.correlations()) for (_, _, _, part), moment in zip(spots, moments))


def _samples(own: Tensor, its: Tensor, begin: int, width: int, repeat: int) -> tuple[Tensor, Tensor]:
    """The values of `width` channels from `begin` on at the same places in two maps: two tensors (samples, width)."""
    own, its = (_as_map(x, begin, width, repeat) for x in (own, its))
    grid = [min(a, b, MEASUREMENT.alignment_cells) for a, b in zip(own.shape[2:], its.shape[2:])]
    own, its = (F.interpolate(x, size=grid, mode="nearest") for x in (own, its))
    return tuple(x.movedim(1, -1).reshape(-1, width) for x in (own, its))  # type: ignore[return-value]


def _as_map(x: Tensor, begin: int, width: int, repeat: int) -> Tensor:
    """(N, C, H, W) of some channels; those of a flattened map are in a row of `repeat` places each."""
    if x.ndim == 4:
        return x[:, begin : begin + width]
    chosen = x.reshape(-1, x.shape[-1])[:, begin : begin + width * repeat]
    return chosen.reshape(len(chosen), width, 1, repeat)


class CrossMoments:
    """Correlations between two sets of channels over batches of samples (n, C) that are given together."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, own: Tensor, its: Tensor) -> None:
        """Count these samples in."""
        new = [own.sum(0), its.sum(0), own.square().sum(0), its.square().sum(0), own.T @ its]
        new = [total.double() for total in new]
        self._sums = [old + more for old, more in zip(self._sums, new)] if self._sums else new
        self._count += len(own)

    def correlations(self) -> Tensor:
        """f32 (C, C): row = own channel, column = the other's; 0 for a channel that never changes, or was not seen."""
        if not self._sums:
            return torch.zeros(())
        a, b, aa, bb, ab = (total / self._count for total in self._sums)
        deviations = [(square - mean.square()).clamp(min=0).sqrt() for mean, square in ((a, aa), (b, bb))]
        scaled = [torch.where(d > EPSILON, 1 / d.clamp(min=EPSILON), 0.0) for d in deviations]
        return ((ab - torch.outer(a, b)) * torch.outer(*scaled)).float()


def _keeps_outputs(ctx: MergeContext, query: str, state: State, channels: Channels, orders: Orders) -> bool:
    """Whether permuted channels leave a model's outputs unchanged on two frames; in float32, for TF32 is too coarse."""
    frames = as_input(ctx, query, raw_frames(ctx, query, 2))
    answers = []
    for one in (state, permute_channels(state, channels, orders)):
        model: nn.Module = ctx.models([query], {query: dict(one)})[query].eval()
        with torch.no_grad(), disable_tf32():
            answers.append([leaf for leaf in tree_leaves(model(frames)) if isinstance(leaf, Tensor)])
    ctx.flops.add(ctx.queries[query], 2 * len(frames))
    return all(
        before.shape == after.shape
        and bool(
            ((before - after).abs() <= MEASUREMENT.output_tolerance * before.abs().amax().clamp(min=EPSILON)).all()
        )
        for before, after in zip(*answers)
    )
