"""The weights of a merge that may be stored in fewer bits: each once, wherever it stands, and in which width."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from merger.checkpoint import State
from merger.core.context import MergeContext
from merger.core.merged import Merged
from models.bits import Bits, stored_bytes
from models.quantization import WIDE, PackedWeight, choices, pack
from models.sharing.layers import layers_of, weight_key
from models.sharing.plan import tie

LARGEST_FP16 = torch.finfo(torch.float16).max
Widths = Mapping[str, Mapping[str, Bits]]
"""Query -> state dict key -> how it is stored; float32 where nothing is said."""


@dataclass(frozen=True)
class Storage:
    """How the tensors of each query are stored, and the norms of those that were measured again or learnt."""

    widths: Widths
    norms: Mapping[str, State]

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        return {"widths": {query: dict(own) for query, own in self.widths.items()}, "norms": dict(self.norms)}


@dataclass(frozen=True)
class Weight:
    """A weight that is stored once: the (query, state dict key) places it stands at, and how it may be stored.

    `widths` begin with the fewest bits; `level` is which of them it has, or their number for float32.
    """

    places: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    widths: tuple[Bits, ...]
    level: int = 0

    @property
    def width(self) -> Bits | None:
        """How it is stored; None for float32."""
        return self.widths[self.level] if self.level < len(self.widths) else None

    @property
    def nbytes(self) -> int:
        """Bytes as stored, its scale included."""
        if self.width is None:
            return math.prod(self.shape) * WIDE.itemsize
        scale = 0 if self.width == "fp16" else self.shape[0] * WIDE.itemsize
        return stored_bytes(self.width, self.shape) + scale

    @property
    def wider(self) -> Weight:
        """The same one step wider."""
        return self.at(self.level + 1)

    def at(self, level: int) -> Weight:
        """The same in another width."""
        return replace(self, level=level)

    def without(self, queries: Collection[str]) -> Weight:
        """The same where none of these queries has it."""
        return replace(self, places=tuple(place for place in self.places if place[0] not in queries))

    def used_by(self, queries: set[str]) -> bool:
        """Whether it stands in any of these models."""
        return any(query in queries for query, _ in self.places)


def nbytes_of(weights: Iterable[Weight]) -> int:
    """Bytes of these weights as they are stored."""
    return sum(weight.nbytes for weight in weights)


def store(models: Mapping[str, nn.Module], storage: Storage) -> dict[str, dict[str, PackedWeight]]:
    """Give these models, tied, the weights that their packed tensors widen to, in place; returns those tensors."""
    made: dict[int, PackedWeight] = {}
    stored: dict[str, dict[str, PackedWeight]] = {}
    with torch.no_grad():
        for query, model in models.items():
            parameters = model.state_dict(keep_vars=True)
            for key, width in storage.widths.get(query, {}).items():
                weight = parameters[key]
                if id(weight) not in made:  # what is tied was packed with the first that uses it
                    made[id(weight)] = pack(weight, width)
                    weight.copy_(made[id(weight)].wide())
                stored.setdefault(query, {})[key] = made[id(weight)]
            model.load_state_dict(storage.norms.get(query, {}), strict=False)
    return stored


def weights_of(ctx: MergeContext, merged: Merged, asked_for: Bits) -> list[Weight]:
    """Every weight that may be stored in fewer bits, each once, in the fewest that were asked for."""
    models = tied_models(ctx, merged, ctx.queries)
    found: dict[int, Weight] = {}
    for query, model in models.items():
        state = model.state_dict(keep_vars=True)
        heads = {weight_key(state, row.path) for row in layers_of(ctx.queries[query]) if row.head}
        for key, tensor in state.items():
            own: tuple[Bits, ...] = ()
            if tensor.dtype == WIDE:
                own = choices(key, tensor.shape, asked_for, key in heads)
            if tensor.numel() and float(tensor.detach().abs().max()) > LARGEST_FP16:
                own = tuple(width for width in own if width != "fp16")
            if not own:
                continue
            before = found.get(id(tensor), Weight((), tuple(tensor.shape), own))
            both = tuple(width for width in before.widths if width in own)
            found[id(tensor)] = replace(before, places=(*before.places, (query, key)), widths=both)
    return [weight for weight in found.values() if weight.widths]


def widths_of(weights: Sequence[Weight]) -> Widths:
    """How the tensors of each query are stored."""
    widths: dict[str, dict[str, Bits]] = {}
    for weight in weights:
        for query, key in weight.places:
            if weight.width is not None:
                widths.setdefault(query, {})[key] = weight.width
    return widths


def tied_models(ctx: MergeContext, merged: Merged, queries: Iterable[str]) -> dict[str, nn.Module]:
    """Fresh models of these queries as they were merged."""
    models = ctx.models(queries, merged.states, merged.plan)
    tie(models, merged.plan)
    return models
