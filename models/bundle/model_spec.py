"""The tensors that a query's architecture needs of a bundle, found by building it on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemel.models.bundle.format import code_of
from gemel.models.bundle.manifest import BundleQuery
from gemel.models.errors import BundleError, InputError

if TYPE_CHECKING:
    from torch import nn

    from gemel.models.workload import Query

REMEDY = "copy or build the bundle again"


@dataclass(frozen=True)
class ModelSpec:
    """A model's state dict: `tensors` by key as (dtype code, shape), `same` the keys that alias an earlier key."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    same: Mapping[str, str]


_ZOO_SPECS: dict[str, ModelSpec] = {}


def load_model_spec(query: Query | BundleQuery, build: Callable[[], nn.Module]) -> ModelSpec:
    """The spec of a query's architecture; `build` builds it on the meta device, once unless it is foreign."""
    network = query.network if isinstance(query, BundleQuery) else (query.model,)
    # A graph that no bundle holds yet has no name to be known by.
    if not is_zoo_model(query.model) and getattr(query, "graph", None) is None:
        return model_spec(build())
    key = repr(
        (
            network,
            sorted(query.model_args.items()),
            len(query.classes),
            query.task,
            query.input_size,
        )
    )
    if key not in _ZOO_SPECS:
        _ZOO_SPECS[key] = model_spec(build())
    return _ZOO_SPECS[key]


def is_zoo_model(model: str) -> bool:
    """Whether this project's own code builds the model."""
    from gemel.models import zoo

    return model in zoo.OWN


def model_spec(model: nn.Module) -> ModelSpec:
    """What a module needs; it may be on the meta device."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    same = {
        key: earlier
        for key, tensor in state.items()
        if (earlier := first.setdefault(id(tensor), key)) != key
    }
    return ModelSpec(
        {key: (code_of(tensor.dtype), tuple(tensor.shape)) for key, tensor in state.items()}, same
    )


def architecture(
    query: BundleQuery,
    factories: Collection[str],
    path: Path,
    folder: Path | None,
    document: bytes | None,
    device: str = "meta",
) -> nn.Module:
    """The query's architecture on the meta device or with random weights, from its document if it has one.

    Raises BundleError when it may not or cannot be built.
    """
    from gemel.models import zoo

    if document is not None:
        return _graph_architecture(query, path, document)
    if not zoo.is_zoo_name(query.model) and query.model not in factories:
        remedy = "list it under `factories` in the local config if you trust it"
        raise BundleError(
            path, f"query {query.id}: model '{query.model}' is not in the zoo", remedy
        )
    try:
        return zoo.build(
            query.model,
            query.classes,
            query.model_args,
            query.input_size,
            query.task,
            device,
            folder,
        )
    except InputError as error:
        remedy = REMEDY if zoo.is_zoo_name(query.model) else error.hint
        raise BundleError(
            path, f"query {query.id}: {query.model} cannot be built: {error.problem}", remedy
        ) from error
    except Exception as error:  # a hostile manifest can make an architecture fail in any way
        fault = (
            f"query {query.id}: {query.model} cannot be built: {' '.join(str(error).split())[:300]}"
        )
        raise BundleError(path, fault, REMEDY) from error


def _graph_architecture(query: BundleQuery, path: Path, document: bytes) -> nn.Module:
    from gemel.models.decoders import AUTO
    from gemel.models.decoders.graph_model import build_model
    from gemel.models.graph.stored import restore_graph

    try:
        return build_model(
            restore_graph(document), query.decoder or AUTO, query.task, query.classes, path, "meta"
        )
    except Exception as error:  # a hostile document can make a graph fail in any way
        reason = (
            error.problem if isinstance(error, InputError) else " ".join(str(error).split())[:300]
        )
        raise BundleError(
            path, f"query {query.id}: its graph cannot be built: {reason}", REMEDY
        ) from error
