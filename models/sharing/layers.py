"""The layers of a workload's models: their weights, their signatures, their bytes. Nothing is ever allocated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from gemel.models.preprocess import InputSize
    from gemel.models.workload import Query

Signature = Literal["wide", "strict"]
PACKED_SUFFIX = "_proj_weight"
"""How attention names its packed projections (`in_proj_weight`): linear weights without a module of their own."""


class SetOutcome(str, Enum):
    """What became of a set of layers in a merge: `untried` sets were in no training, probe or attempt."""

    KEPT = "kept"
    PARTLY = "partly"
    REFUSED = "refused"
    UNTRIED = "untried"


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
    """Describe a query's model on the meta device; it is built once for each number of classes."""
    from gemel.models.zoo import build_query, folder_of, input_size_of, naming, width_of
    from gemel.models.zoo.user_models import is_model_file

    if is_model_file(query.model):
        from gemel.models.decoders.graph_model import GraphAnswers, last_layers

        built = build_query(query, "meta")
        assert isinstance(built, GraphAnswers)
        heads = {f"network.{path}" for path in last_layers(built.network)}
        description = _describe_network(built)
        return _architecture(description, {path for path, *_ in description.rows} & heads)
    width = width_of(query.task, query.classes)
    with naming(query):
        return describe(
            query.model, width, input_size_of(query), query.task, query.model_args, folder_of(query)
        )


def describe(
    model: str,
    width: int,
    input_size: InputSize,
    task: str,
    model_args: dict | None = None,
    folder: Path | None = None,
) -> Architecture:
    """Describe a zoo name or factory; `width` = number of classes, a detector's background among them.

    A factory may be in `folder`.
    """
    return _describe(
        model,
        json.dumps(model_args or {}, sort_keys=True, default=str),
        input_size,
        task,
        folder,
        width,
    )


def weight_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that owns a layer's weight, and the attribute's name; `in_proj_weight` for a path `in_proj`."""
    owner, _, name = path.rpartition(".")
    parent = model.get_submodule(owner)
    return (
        (parent, f"{name}_weight")
        if hasattr(parent, f"{name}_weight")
        else (parent.get_submodule(name), "weight")
    )


def weight_key(state: object, path: str) -> str:
    """The key of a layer's weight in a state dict (anything that knows `in`)."""
    packed = f"{path}_weight"
    return packed if packed in state else f"{path}.weight"  # type: ignore[operator]


def state_bytes(module: nn.Module) -> int:
    """Bytes of the unique parameters and buffers that a state dict would hold."""
    unique = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in unique.values())


@lru_cache(maxsize=4096)
def _describe(
    model: str, args: str, input_size: InputSize, task: str, folder: Path | None, width: int
) -> Architecture:
    """Heads are the layers that differ between two class counts."""
    narrower, wider = (
        _build_network(model, args, input_size, task, folder, classes)
        for classes in (width, width + 1)
    )
    wider_shapes = {path: wide for path, wide, *_ in wider.rows}
    return _architecture(
        narrower, {path for path, wide, *_ in narrower.rows if wider_shapes.get(path) != wide}
    )


def _architecture(network: _Network, heads: set[str]) -> Architecture:
    last = max(1, len(network.rows) - 1)
    layers = [
        (path, wide, strict, nbytes, path in heads, index / last)
        for index, (path, wide, strict, nbytes) in enumerate(network.rows)
    ]
    return Architecture(tuple(layers), network.parameters, network.bytes)


@dataclass(frozen=True)
class _Network:
    """A model at one class count: `rows` as (path, wide, strict, bytes) of each layer."""

    rows: tuple[tuple[str, str, str, int], ...]
    parameters: int
    bytes: int


@lru_cache(maxsize=4096)
def _build_network(
    model: str, args: str, input_size: InputSize, task: str, folder: Path | None, width: int
) -> _Network:
    from gemel.models.zoo import build

    return _describe_network(
        build(model, width, json.loads(args), input_size, task, device="meta", folder=folder)
    )


def _describe_network(built: nn.Module) -> _Network:
    rows = []
    for path, module, attribute, kind in weights_in(built):
        weight = getattr(module, attribute)
        groups = f" groups={module.groups}" if kind == "conv2d" else ""
        wide = f"{kind} {'x'.join(map(str, weight.shape))}{groups} {str(weight.dtype).removeprefix('torch.')}"
        rows.append((path, wide, f"{wide} {_details(module)}", weight.nbytes))
    return _Network(
        tuple(rows), sum(parameter.numel() for parameter in built.parameters()), state_bytes(built)
    )


def weights_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Every weight that can be shared: (layer path, module that owns it, its attribute, kind).

    One that is computed from other tensors (weight norm, spectral norm) is none of them.
    """
    from torch import nn

    for path, module in model.named_modules():
        kind = (
            "conv2d"
            if isinstance(module, nn.Conv2d)
            else "linear"
            if isinstance(module, nn.Linear)
            else None
        )
        if kind is not None:
            if "weight" in module._parameters:
                yield path, module, "weight", kind
        elif isinstance(module, nn.MultiheadAttention):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith(PACKED_SUFFIX) and parameter.ndim == 2:
                    yield (
                        f"{path}.{name}".removesuffix("_weight").removeprefix("."),
                        module,
                        name,
                        "linear",
                    )


def _details(module: nn.Module) -> str:
    from torch import nn

    if isinstance(module, nn.MultiheadAttention):
        return "bias" if module.in_proj_bias is not None else "no bias"
    bias = "bias" if module.bias is not None else "no bias"
    if isinstance(module, nn.Conv2d):
        window = f"stride={module.stride} padding={module.padding} dilation={module.dilation}"
        return f"{window} {module.padding_mode} {bias}"
    return bias
