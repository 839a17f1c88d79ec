"""The engines by name; the module of one is imported when it is used, since some import slow libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import InputError

if TYPE_CHECKING:
    import torch

    from edge_runtime.engines.base import FrameEngine
    from models.bundle import Bundle

AUTO = "auto"
FALLBACK = "torch"
"""Runs every architecture."""
ENGINES: dict[str, tuple[str, str]] = {
    "torch": ("edge_runtime.engines.torch_engine", "TorchEngine"),
    "compiled": ("edge_runtime.engines.compiled", "CompiledEngine"),
    "onnx": ("edge_runtime.engines.onnx", "OnnxEngine"),
    "openvino": ("edge_runtime.engines.openvino", "OpenvinoEngine"),
    "tensorrt": ("edge_runtime.engines.onnx", "TensorrtEngine"),
}
"""Name -> module and class."""
SESSIONS: dict[str, tuple[str, str]] = {
    "onnx": ("edge_runtime.engines.session", "open_sessions"),
    "openvino": ("edge_runtime.engines.openvino", "open_sessions"),
}
"""Name -> module and function that opens engines with weights of their own, for queries that fit the budget so."""


def check_engine(name: str, where: str | Path, key: str) -> str:
    """`name` itself; InputError for one that is neither "auto" nor in ENGINES."""
    if name not in (AUTO, *ENGINES):
        raise InputError(where, f"unknown engine '{name}'", f"use {', '.join((AUTO, *ENGINES))}", key)
    return name


def engine_class(name: str) -> type[FrameEngine]:
    """The class of an engine; KeyError for a name that is not in ENGINES."""
    module, kind = ENGINES[name]
    return getattr(importlib.import_module(module), kind)


def open_sessions_by(
    name: str, bundle: Bundle, query_ids: Sequence[str], device: str | torch.device = "cpu", **options: Any
) -> Iterator[Mapping[str, FrameEngine]]:
    """The engines of these queries by session, of an engine in SESSIONS; raises EngineError where it has none."""
    module, function = SESSIONS[name]
    return getattr(importlib.import_module(module), function)(bundle, query_ids, device, **options)


def make_engine(
    name: str, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", **options: Any
) -> FrameEngine:
    """An engine of this name for one query of a bundle, unbound; `options` are those of its class."""
    return engine_class(name)(bundle, query_id, device, **options)
