"""The graph of an architecture as ONNX Runtime takes it: all weights are inputs, none has any bytes in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_runtime.engines.architecture import key_of
from edge_runtime.engines.base import EngineError
from models.bundle import Bundle, BundleQuery
from models.detector import Detector, OneStage
from models.errors import InputError

SUFFIX = ".onnx"
FORMAT = 1
"""Counted up when graphs are made differently, so that older ones are made anew."""
MEASURED = (1, 4)
"""The batches whose workspace is measured; others lie on the line through them."""


def graph_key(query: BundleQuery, model: nn.Module) -> dict[str, Any]:
    """The key of the graph that serves this query; `model` lies on the meta device."""
    key = {key: value for key, value in key_of(query, model, torch.device("cpu")).items() if key != "machine"}
    stored = {path: own.dtype for path, own in sorted(query.stored.items())}
    return {"engine": "onnx", "format": FORMAT, "torch": torch.__version__, "stored": stored, **key}


def write_graph(bundle: Bundle, query: BundleQuery, path: Path) -> Mapping[str, Any]:
    """Write the graph to `path`; notes whether it takes any batch or one frame alone (`batch`: "dynamic" or 1), and
    the `workspace` of runs by batch, as far as the system tells.

    Takes 2 to 17 seconds. Raises EngineError for an architecture that cannot be exported.
    """
    import onnx

    from edge_runtime.engines.onnx.session import CPU, session_of
    from edge_runtime.engines.onnx.workspace import measured
    from models.export import graph_without_weights

    model = _placeholders(bundle.build(query.id, "meta"))
    stored = {key: own.dtype for key, own in query.stored.items()}
    dynamic = not isinstance(model, Detector) or isinstance(model, OneStage)
    try:
        graph = graph_without_weights(model, query.input_size, "dynamic" if dynamic else 1, stored)
    except InputError as error:
        if not dynamic:
            raise EngineError(f"it cannot be exported: {error.problem}") from error
        graph, dynamic = _for_one_frame(model, query, stored), False
    path.write_bytes(graph)
    runtime = session_of(path, CPU, torch.device("cpu")).runtime
    batches = MEASURED if dynamic else MEASURED[:1]
    workspace = measured(runtime, onnx.load_from_string(graph).graph, query.input_size, batches)
    return {"model": query.model, "batch": "dynamic" if dynamic else 1, "workspace": workspace}


def _for_one_frame(model: nn.Module, query: BundleQuery, stored: Mapping[str, str]) -> bytes:
    """The graph of a model of a user's own whose forward fixes the batch."""
    from models.export import graph_without_weights

    try:
        return graph_without_weights(model, query.input_size, 1, stored)
    except InputError as error:
        raise EngineError(f"it cannot be exported: {error.problem}") from error


def _placeholders(model: nn.Module) -> nn.Module:
    """Give each place a tensor of its own, which nobody reads.

    With the bundle's, two places that hold equal bytes would be one tensor, and one input of the graph; another query
    of this architecture has different ones there.
    """
    state = {key: torch.empty_like(tensor, device="cpu") for key, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model
