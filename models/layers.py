"""The layers of a workload's models, which of them could share one weight, and how many bytes that would save."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from models.workload import Query
from models.zoo import build

Signature = Literal["wide", "strict"]
SHAREABLE = (nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer at a path in one query's model. `bytes` are those of its weight alone.

    `wide` is what lets two layers use one weight tensor (kind, weight shape, groups, dtype); `strict` is the paper's
    rule (stride, padding, dilation and bias equal too). A head's width is set by the classes, so it is private.
    """

    query: str
    path: str
    wide: str
    strict: str
    bytes: int
    head: bool

    @property
    def weight(self) -> str:
        """The parameter path of the weight, as in the state dict."""
        return f"{self.path}.weight"

    def signature(self, kind: Signature) -> str:
        """The signature under one of the two rules."""
        return self.wide if kind == "wide" else self.strict


@dataclass(frozen=True)
class Group:
    """Layers of one signature, at most one from each query, that could share one weight of `bytes`."""

    signature: str
    members: tuple[tuple[str, str], ...]
    bytes: int

    @property
    def saved_bytes(self) -> int:
        """What sharing the whole group saves."""
        return self.bytes * (len(self.members) - 1)


@dataclass(frozen=True)
class Architecture:
    """What one model is made of, free of any query: `layers` as (path, wide, strict, bytes, head)."""

    layers: tuple[tuple[str, str, str, int, bool], ...]
    bytes: int


def layers_of(query: Query) -> list[Layer]:
    """The convolutions and linear layers of a query's model in the order of the network; needs no weights."""
    return [Layer(query.id, *row) for row in architecture(query).layers]


def model_bytes(query: Query) -> int:
    """Bytes of the unique parameters and buffers of a query's model."""
    return architecture(query).bytes


def architecture(query: Query) -> Architecture:
    """Describe a query's model on the meta device; the same model is described once."""
    args = json.dumps(query.model_args, sort_keys=True, default=str)
    return _architecture(query.model, args, len(query.classes), query.input_size, query.task)


@lru_cache(maxsize=1024)
def _architecture(model: str, args: str, classes: int, input_size: int, task: str) -> Architecture:
    width = classes + (task == "detection")
    built, wider = (
        build(model, (), json.loads(args), input_size, task, device="meta", num_classes=width + extra)
        for extra in (0, 1)
    )
    wider_shapes = {name: tensor.shape for name, tensor in wider.named_parameters(remove_duplicate=False)}
    rows = []
    for path, module in built.named_modules():
        if isinstance(module, SHAREABLE):
            head = wider_shapes.get(f"{path}.weight") != module.weight.shape
            rows.append((path, *_signatures(module), module.weight.nbytes, head))
    return Architecture(tuple(rows), state_bytes(built))


def state_bytes(module: nn.Module) -> int:
    """Bytes of the unique parameters and buffers that a state dict would hold."""
    unique = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in unique.values())


def _signatures(module: nn.Module) -> tuple[str, str]:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    shape = "x".join(str(size) for size in weight.shape)
    dtype = str(weight.dtype).removeprefix("torch.")
    bias = "bias" if module.bias is not None else "no bias"
    if isinstance(module, nn.Conv2d):
        wide = f"conv2d {shape} groups={module.groups} {dtype}"
        details = f"stride={module.stride} padding={module.padding} dilation={module.dilation} {module.padding_mode}"
        return wide, f"{wide} {details} {bias}"
    wide = f"linear {shape} {dtype}"
    return wide, f"{wide} {bias}"


def groups(layers: Iterable[Layer], signature: Signature = "wide") -> list[Group]:
    """All groups of two members or more, in descending order of bytes saved.

    Where a model holds a signature more than once, its k-th occurrence meets the k-th of the others.
    """
    occurrences: dict[str, dict[str, list[Layer]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        if not layer.head:
            occurrences[layer.signature(signature)][layer.query].append(layer)
    found = []
    for name, by_query in occurrences.items():
        for index in range(max(len(rows) for rows in by_query.values())):
            rows = [rows[index] for rows in by_query.values() if index < len(rows)]
            if len(rows) > 1:
                found.append(Group(name, tuple((row.query, row.path) for row in rows), rows[0].bytes))
    return sorted(found, key=lambda group: (-group.saved_bytes, group.signature, group.members))


def ceiling_bytes(layers: Iterable[Layer], signature: Signature = "wide") -> int:
    """Bytes saved if every group were shared: sum over signatures of bytes x (sum of n_q - max of n_q)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    size: dict[str, int] = {}
    for layer in layers:
        if not layer.head:
            name = layer.signature(signature)
            counts[name][layer.query] += 1
            size[name] = layer.bytes
    return sum(size[name] * (n.total() - max(n.values())) for name, n in counts.items())


def layers_of_all(queries: Sequence[Query]) -> list[Layer]:
    """The layers of every query, one after the other."""
    return [layer for query in queries for layer in layers_of(query)]
