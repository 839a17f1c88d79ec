"""The weights of a merge that may be stored narrow: each once, wherever it stands, and how it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from merger.bench.merged import Merged, State
from merger.bench.workbench import Workbench
from models.bundle.manifest import RESIDUAL_A, RESIDUAL_B
from models.parts.residual import residual_layers
from models.parts.widths import STORED, WIDE, Narrow, NarrowDtype, choices, narrowed
from models.sharing.layers import layers_of, weight_key
from models.sharing.plan import tie

LARGEST_FP16 = torch.finfo(torch.float16).max
Dtypes = Mapping[str, Mapping[str, NarrowDtype]]
"""Query -> state dict key -> how it is stored; float32 where nothing is said."""


@dataclass(frozen=True)
class Narrowing:
    """How the tensors of each query are stored, and the norm statistics of those measured again."""

    dtypes: Dtypes
    norms: Mapping[str, State]

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        return {"dtypes": {query: dict(own) for query, own in self.dtypes.items()}, "norms": dict(self.norms)}


@dataclass(frozen=True)
class Weight:
    """A weight that is stored once: the (query, state dict key) places it stands at, and how it may be stored.

    `dtypes` are narrowest first; `level` is which of them it has, or their number for float32.
    """

    places: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    dtypes: tuple[NarrowDtype, ...]
    level: int = 0

    @property
    def dtype(self) -> NarrowDtype | None:
        """How it is stored; None for float32."""
        return self.dtypes[self.level] if self.level < len(self.dtypes) else None

    @property
    def nbytes(self) -> int:
        """Bytes as stored, its scale included."""
        itemsize = WIDE.itemsize if self.dtype is None else STORED[self.dtype].itemsize
        return math.prod(self.shape) * itemsize + (self.shape[0] * WIDE.itemsize if self.dtype == "int8" else 0)

    @property
    def wider(self) -> Weight:
        """The same one step wider."""
        return replace(self, level=self.level + 1)

    def used_by(self, queries: set[str]) -> bool:
        """Whether it stands in any of these models."""
        return any(query in queries for query, _ in self.places)


def store(models: Mapping[str, nn.Module], narrowing: Narrowing) -> dict[str, dict[str, Narrow]]:
    """Give these models, tied, the weights that their narrow tensors widen to, in place; returns those tensors."""
    made: dict[int, Narrow] = {}
    stored: dict[str, dict[str, Narrow]] = {}
    with torch.no_grad():
        for query, model in models.items():
            parameters = model.state_dict(keep_vars=True)
            for key, dtype in narrowing.dtypes.get(query, {}).items():
                weight = parameters[key]
                if id(weight) not in made:  # what is tied was narrowed with the first that uses it
                    made[id(weight)] = narrowed(weight, dtype)
                    weight.copy_(made[id(weight)].wide())
                stored.setdefault(query, {})[key] = made[id(weight)]
            model.load_state_dict(narrowing.norms.get(query, {}), strict=False)
    return stored


def weights_of(bench: Workbench, merged: Merged, asked_for: str) -> list[Weight]:
    """Every weight that may be stored narrow, each once, as narrow as was asked for."""
    models = tied_models(bench, merged, bench.queries)
    found: dict[int, Weight] = {}
    for query, model in models.items():
        state = model.state_dict(keep_vars=True)
        heads = {weight_key(state, row.path) for row in layers_of(bench.asked(query, merged.plan)) if row.head}
        for key, tensor in state.items():
            own: tuple[NarrowDtype, ...] = ()
            if tensor.dtype == WIDE:
                own = choices(key, tensor.shape, asked_for, key in heads)
            if tensor.numel() and float(tensor.detach().abs().max()) > LARGEST_FP16:
                own = tuple(dtype for dtype in own if dtype != "fp16")
            if not own:
                continue
            before = found.get(id(tensor), Weight((), tuple(tensor.shape), own))
            both = tuple(dtype for dtype in before.dtypes if dtype in own)
            found[id(tensor)] = replace(before, places=(*before.places, (query, key)), dtypes=both)
    return [weight for weight in found.values() if weight.dtypes]


def dtypes_of(weights: Sequence[Weight]) -> Dtypes:
    """How the tensors of each query are stored."""
    dtypes: dict[str, dict[str, NarrowDtype]] = {}
    for weight in weights:
        for query, key in weight.places:
            if weight.dtype is not None:
                dtypes.setdefault(query, {})[key] = weight.dtype
    return dtypes


def tied_models(bench: Workbench, merged: Merged, queries: Iterable[str]) -> dict[str, nn.Module]:
    """Fresh models of these queries as they were merged."""
    models = bench.models(queries, merged.states, merged.plan)
    tie(models, merged.plan)
    return models


def residual_bytes(model: nn.Module, stored: Mapping[str, Narrow]) -> int:
    """Bytes of a model's residuals as they are stored."""
    total = 0
    for layer, module in residual_layers(model).items():
        for name in (RESIDUAL_A, RESIDUAL_B):
            narrow = stored.get(f"{layer}.{name}")
            total += getattr(module, name).nbytes if narrow is None else narrow.tensor.nbytes
    return total
