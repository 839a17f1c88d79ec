"""The layers of a workload's models: their weights, their signatures, their bytes. Nothing is ever allocated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from models.workload import Query

Signature = Literal["wide", "strict"]
PACKED_SUFFIX = "_proj_weight"
"""How attention names its packed projections (`in_proj_weight`): linear weights without a module of their own."""
TRIAL_WIDTHS = (3, 4)
"""Class counts at which a zoo model is described; every shape grows linearly from one to the next."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or linear layer at a path in one query's model. `bytes` are those of its weight alone.

    `wide` is what lets two layers use one weight tensor (kind, weight shape, groups, dtype); `strict` is the paper's
    rule (stride, padding, dilation and bias equal too). A head's width is set by the classes, so it is private.
    `position` is the place in the network, 0 the first layer and 1 the last.
    """

    query: str
    path: str
    wide: str
    strict: str
    bytes: int
    head: bool
    position: float = 0.0

    def signature(self, kind: Signature) -> str:
        """The signature under one of the two rules."""
        return self.wide if kind == "wide" else self.strict


@dataclass(frozen=True)
class Architecture:
    """A model's layers and sizes, independent of a query: `layers` as (path, wide, strict, bytes, head, position)."""

    layers: tuple[tuple[str, str, str, int, bool, float], ...]
    parameters: int
    bytes: int


def layers_of(query: Query) -> list[Layer]:
    """The convolutions and linear layers of a query's model in the order of the network; needs no weights."""
    return [Layer(query.id, *row) for row in architecture(query).layers]


def layers_of_all(queries: Sequence[Query]) -> list[Layer]:
    """The layers of every query, one after the other."""
    return [layer for query in queries for layer in layers_of(query)]


def model_bytes(query: Query) -> int:
    """Bytes of the unique parameters and buffers of a query's model."""
    return architecture(query).bytes


def architecture(query: Query) -> Architecture:
    """Describe a query's model on the meta device; models that differ only in their classes are built once."""
    from models.zoo import folder_of, naming

    width = len(query.classes) + (query.task == "detection")
    with naming(query):
        return describe(query.model, width, query.input_size, query.task, query.model_args, folder_of(query))


def describe(
    model: str, width: int, input_size: int, task: str, model_args: dict | None = None, folder: Path | None = None
) -> Architecture:
    """Describe a zoo name or factory; `width` = number of classes, a detector's background among them.

    A factory may be in `folder`.
    """
    from models.zoo import is_zoo_name

    args = json.dumps(model_args or {}, sort_keys=True, default=str)
    # The zoo's models grow linearly with the class count; a user's factory may do anything.
    widths = TRIAL_WIDTHS if is_zoo_name(model) else (width, width + 1)
    return _at_width(model, args, input_size, task, folder, widths, width)


def weight_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that owns a layer's weight, and the attribute's name; `in_proj_weight` for a path `in_proj`."""
    owner, _, name = path.rpartition(".")
    parent = model.get_submodule(owner)
    return (parent, f"{name}_weight") if hasattr(parent, f"{name}_weight") else (parent.get_submodule(name), "weight")


def weight_key(state: object, path: str) -> str:
    """The key of a layer's weight in a state dict (anything that knows `in`)."""
    packed = f"{path}_weight"
    return packed if packed in state else f"{path}.weight"  # type: ignore[operator]


def state_bytes(module: nn.Module) -> int:
    """Bytes of the unique parameters and buffers that a state dict would hold."""
    unique = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in unique.values())


@dataclass(frozen=True)
class _Tensor:
    """One tensor's shape at the first trial width, and what each dimension grows by per class."""

    shape: tuple[int, ...]
    growth: tuple[int, ...]
    itemsize: int
    is_parameter: bool

    def at(self, extra: int) -> tuple[int, ...]:
        return tuple(size + extra * step for size, step in zip(self.shape, self.growth))


@dataclass(frozen=True)
class _Row:
    """One layer: kind, groups and dtype as in a signature, `details` what only the strict rule looks at."""

    path: str
    weight: _Tensor
    kind: str
    groups: int
    dtype: str
    details: str


@lru_cache(maxsize=4096)
def _at_width(
    model: str, args: str, input_size: int, task: str, folder: Path | None, widths: tuple[int, int], width: int
) -> Architecture:
    rows, tensors = _describe_at_widths(model, args, input_size, task, folder, widths)
    extra, last, layers = width - widths[0], max(1, len(rows) - 1), []
    for index, row in enumerate(rows):
        shape = row.weight.at(extra)
        groups = f" groups={row.groups}" if row.kind == "conv2d" else ""
        wide = f"{row.kind} {'x'.join(map(str, shape))}{groups} {row.dtype}"
        nbytes = math.prod(shape) * row.weight.itemsize
        layers.append((row.path, wide, f"{wide} {row.details}", nbytes, any(row.weight.growth), index / last))
    counts = [math.prod(tensor.at(extra)) for tensor in tensors]
    return Architecture(
        tuple(layers),
        sum(count for count, tensor in zip(counts, tensors) if tensor.is_parameter),
        sum(count * tensor.itemsize for count, tensor in zip(counts, tensors)),
    )


@lru_cache(maxsize=1024)
def _describe_at_widths(
    model: str, args: str, input_size: int, task: str, folder: Path | None, widths: tuple[int, int]
) -> tuple[tuple[_Row, ...], tuple[_Tensor, ...]]:
    """The layers and all unique tensors of a model, found by building it at two widths."""
    from torch import nn

    from models.zoo import build

    built, wider = (
        build(model, width, json.loads(args), input_size, task, device="meta", folder=folder) for width in widths
    )
    wider_state = wider.state_dict()
    unique: dict[int, str] = {}
    tensors: dict[str, _Tensor] = {}
    for name, tensor in built.state_dict(keep_vars=True).items():
        other = wider_state.get(name)
        other_shape = tensor.shape if other is None or other.ndim != tensor.ndim else other.shape
        growth = tuple(high - low for low, high in zip(tensor.shape, other_shape))
        first = unique.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = _Tensor(
                tuple(tensor.shape), growth, tensor.element_size(), isinstance(tensor, nn.Parameter)
            )
    rows = []
    for path, module, attribute, kind in weights_in(built):
        weight = getattr(module, attribute)
        key = unique[id(weight)]
        groups = getattr(module, "groups", 1)
        rows.append(_Row(path, tensors[key], kind, groups, str(weight.dtype).removeprefix("torch."), _details(module)))
    return tuple(rows), tuple(tensors.values())


def weights_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Every weight that can be shared: (layer path, module that owns it, its attribute, kind).

    One that is computed from other tensors (weight norm, spectral norm) is none of them.
    """
    from torch import nn

    for path, module in model.named_modules():
        kind = "conv2d" if isinstance(module, nn.Conv2d) else "linear" if isinstance(module, nn.Linear) else None
        if kind is not None:
            if "weight" in module._parameters:
                yield path, module, "weight", kind
        elif isinstance(module, nn.MultiheadAttention):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith(PACKED_SUFFIX) and parameter.ndim == 2:
                    yield f"{path}.{name}".removesuffix("_weight").removeprefix("."), module, name, "linear"


def _details(module: nn.Module) -> str:
    from torch import nn

    if isinstance(module, nn.MultiheadAttention):
        return "bias" if module.in_proj_bias is not None else "no bias"
    bias = "bias" if module.bias is not None else "no bias"
    if isinstance(module, nn.Conv2d):
        return (
            f"stride={module.stride} padding={module.padding} dilation={module.dilation} {module.padding_mode} {bias}"
        )
    return bias
