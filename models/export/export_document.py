"""Writes the networks of a bundle's queries as ONNX documents without weights, so that a box builds no architecture.

A document refers to its weights by their keys in the query's state dict, as the document of an imported file does:
every initialiser that a bundle holds is external data in `weights.bin`. What the exporter made of constants stays in
the document. Its `gemel.outputs` says what its outputs are.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gemel.models.bundle.manifest import GRAPH, MAX_GRAPH_BYTES
from gemel.models.bundle.model_spec import model_spec
from gemel.models.bundle.query_documents import WEIGHTS_FILE
from gemel.models.errors import InputError, size_text
from gemel.models.export.network_outputs import OUTPUTS_KEY
from gemel.models.export.trace import describe_outputs, trace_graph
from gemel.models.notes import add_note

if TYPE_CHECKING:
    import onnx_ir

    from gemel.models.bundle.manifest import BundleQuery
    from gemel.models.preprocess import InputSize


def export_documents(
    models: Mapping[str, nn.Module],
    queries: Sequence[BundleQuery],
    exported: dict[str, bytes | None] | None = None,
) -> dict[str, bytes]:
    """The document of each query whose network is not one already, exported once for each architecture.

    Takes one to ten seconds an architecture; `exported` keeps them for the next call. A network that cannot be exported
    has none, and a note says why.
    """
    documents: dict[str, bytes] = {}
    by_architecture = {} if exported is None else exported
    for query in queries:
        if query.model == GRAPH:
            continue
        key = describe_architecture(query, models[query.id])
        if key not in by_architecture:
            by_architecture[key] = _try_export(models[query.id], query)
        document = by_architecture[key]
        if document is not None:
            documents[query.id] = document
    return documents


def export_document(model: nn.Module, input_size: InputSize) -> bytes:
    """A network as a document without weights, for any batch, or for one frame where its forward fixes that.

    No weight is read, and the model is left as it is. Raises InputError for a network that cannot be exported.
    """
    import onnx_ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    skeleton = _copy_without_weights(model)
    where = type(model).__name__
    try:
        graph = trace_graph(skeleton, where, input_size)
    except InputError:
        graph = trace_graph(skeleton, where, input_size, 1)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    _take_weights_out(graph, skeleton.state_dict())
    graph.metadata_props[OUTPUTS_KEY] = json.dumps(describe_outputs(model))
    document = onnx_ir.to_proto(graph).SerializeToString(deterministic=True)
    if len(document) > MAX_GRAPH_BYTES:
        problem = f"the model cannot be exported: its graph has {size_text(len(document))}"
        raise InputError(where, problem, f"a bundle holds graphs of {size_text(MAX_GRAPH_BYTES)}")
    return document


def _try_export(model: nn.Module, query: BundleQuery) -> bytes | None:
    try:
        return export_document(model, query.input_size)
    except InputError as error:
        hint = "it runs only where gemel[merge] is installed"
        add_note(
            f"query {query.id}", f"{query.model} has no graph in the bundle: {error.problem}", hint
        )
        return None


def describe_architecture(query: BundleQuery, model: nn.Module) -> str:
    """Equal for two queries whose documents are."""
    spec = model_spec(model)
    arguments = [query.model, query.model_args, query.input_size, len(query.classes), query.task]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return json.dumps([kind, arguments, dict(spec.tensors), dict(spec.same)], sort_keys=True)


def _copy_without_weights(model: nn.Module) -> nn.Module:
    """The same modules over memory that was never written to, which takes none; constants keep their values."""
    memo: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        if id(tensor) in memo:
            continue
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    return copy.deepcopy(model, memo).cpu()


def _take_weights_out(model: onnx_ir.Model, state: Mapping[str, Tensor]) -> None:
    import onnx_ir as ir

    for key, value in model.graph.initializers.items():
        tensor = value.const_value
        if key not in state or tensor is None:
            continue
        shape = ir.Shape(tuple(state[key].shape))
        nbytes = math.prod(state[key].shape) * state[key].element_size()
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, 0, nbytes, tensor.dtype, shape=shape, name=key
        )
        value.shape = shape
        value.type = ir.TensorType(tensor.dtype)
