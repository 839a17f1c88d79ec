"""What a query's architecture needs of a bundle: keys, dtypes, shapes, layers that can carry a residual.

It is found by building the architecture on the meta device, or remembered from when that was done last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from models.bundle.format import code_of
from models.bundle.manifest import BundleQuery
from models.errors import BundleError, InputError
from models.io import cached_on_disk

if TYPE_CHECKING:
    from torch import nn


REMEDY = "copy or build the bundle again"


@dataclass(frozen=True)
class ModelSpec:
    """A model's state dict and layers: `tensors` by key as (dtype code, shape); `layers` are the paths of plain
    convolutions and linear layers with their groups; `same` are the keys whose tensor is that of an earlier key.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    layers: Mapping[str, int]
    same: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"tensors": dict(self.tensors), "layers": dict(self.layers), "same": dict(self.same)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelSpec:
        """Inverse of `to_json`."""
        tensors = {key: (dtype, tuple(shape)) for key, (dtype, shape) in value["tensors"].items()}
        return cls(tensors, value["layers"], value["same"])


class ModelRequest(Protocol):
    """What a query of a workload, or of a bundle, says about its model."""

    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def task(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def model_args(self) -> Mapping[str, Any]: ...
    @property
    def input_size(self) -> int: ...


def load_model_spec(query: ModelRequest, build: Callable[[], nn.Module]) -> ModelSpec:
    """The architecture of a query that `build` builds on the meta device, in case it is not remembered.

    The zoo's are remembered; a user's own is built each time, since nobody knows what its code depends on.
    """
    if not is_zoo_model(query.model):
        return model_spec(build())
    found = cached_on_disk({"architecture": model_request(query)}, lambda: model_spec(build()).to_json())
    return ModelSpec.from_json(found)


def is_zoo_model(model: str) -> bool:
    """Whether nobody else's code builds this model, so that what is remembered of it holds."""
    zoo = sys.modules.get("models.zoo")  # as long as nobody needed it, nobody entered a model of their own
    return ":" not in model if zoo is None else model in zoo.OWN


def model_request(query: ModelRequest) -> dict[str, Any]:
    """All that a zoo model's architecture depends on."""
    return {
        "model": query.model, "model_args": dict(query.model_args), "classes": len(query.classes), "task": query.task,
        "input_size": query.input_size,
    }  # fmt: skip


def model_spec(model: nn.Module) -> ModelSpec:
    """What a module needs; it may be on the meta device."""
    from torch import nn

    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    same = {key: earlier for key, tensor in state.items() if (earlier := first.setdefault(id(tensor), key)) != key}
    layers = {
        path: layer.groups if isinstance(layer, nn.Conv2d) else 1
        for path, layer in model.named_modules()
        if type(layer) in (nn.Conv2d, nn.Linear) and f"{path}.weight" in state
    }
    return ModelSpec(
        {key: (code_of(tensor.dtype), tuple(tensor.shape)) for key, tensor in state.items()},
        layers,  # type: ignore[arg-type]
        same,
    )


def architecture(query: BundleQuery, factories: Collection[str], path: Path, folder: Path | None = None) -> nn.Module:
    """The query's plain architecture on the meta device; BundleError when it may not or cannot be built."""
    from models import zoo

    if not zoo.is_zoo_name(query.model) and query.model not in factories:
        remedy = "list it under `factories` in the local config if you trust it"
        raise BundleError(path, f"query {query.id}: model '{query.model}' is not in the zoo", remedy)
    try:
        return zoo.build(query.model, query.classes, query.model_args, query.input_size, query.task, "meta", folder)
    except InputError as error:
        remedy = REMEDY if zoo.is_zoo_name(query.model) else error.remedy  # of a user's model the code may be mended
        raise BundleError(path, f"query {query.id}: {query.model} cannot be built: {error.fault}", remedy) from error
    except Exception as error:  # a hostile manifest can make an architecture fail in any way
        fault = f"query {query.id}: {query.model} cannot be built: {' '.join(str(error).split())[:300]}"
        raise BundleError(path, fault, REMEDY) from error
