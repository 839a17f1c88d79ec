"""Networks from ONNX and torch.export files: read as data, built as torch modules.

The public names are loaded at their first use: the gate (`gemel.models.graph.gate`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemel.models.graph.network import build_graph
    from gemel.models.graph.onnx_reader import load_graph
    from gemel.models.graph.records import Cut, Graph, TensorInfo

__all__ = ["Cut", "Graph", "TensorInfo", "build_graph", "load_graph"]
_HOMES = {"Cut": "records", "Graph": "records", "TensorInfo": "records", "build_graph": "network",
          "load_graph": "onnx_reader"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
