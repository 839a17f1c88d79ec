"""The engines by name; the module of one is imported when it is used, since some import slow libraries."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemel.models.errors import InputError

if TYPE_CHECKING:
    import torch

    from gemel.edge_runtime.engines.base import FrameEngine
    from gemel.models.bundle import Bundle

AUTO = "auto"
FALLBACK = "torch"
"""Runs every architecture."""
ONNX = "onnx"
"""Runs networks that a bundle holds, on a processor."""
ENGINES: dict[str, tuple[str, str]] = {
    "torch": ("gemel.edge_runtime.engines.torch_engine", "TorchEngine"),
    ONNX: ("gemel.edge_runtime.engines.mapped", "MappedEngine"),
}
"""Name -> module and class."""


def check_engine(name: str, where: str | Path, key: str) -> str:
    """`name` itself; InputError for one that is neither "auto" nor in ENGINES."""
    if name not in (AUTO, *ENGINES):
        raise InputError(where, f"unknown engine '{name}'", f"use {', '.join((AUTO, *ENGINES))}", key)
    return name


def engine_class(name: str) -> type[FrameEngine]:
    """The class of an engine; KeyError for a name that is not in ENGINES."""
    module, kind = ENGINES[name]
    return getattr(importlib.import_module(module), kind)


def make_engine(
    name: str, bundle: Bundle, query_id: str, device: str | torch.device = "cpu", **options: Any
) -> FrameEngine:
    """An engine of this name for one query of a bundle, unbound; `options` are those of its class."""
    return engine_class(name)(bundle, query_id, device, **options)
