"""Engines by name, each an architecture without weights that is bound to tensors of the arena."""

from edge_runtime.engines.base import Engine, EngineError, FrameEngine
from edge_runtime.engines.registry import AUTO, ENGINES, check_engine, engine_named, make_engine

__all__ = [
    "AUTO",
    "ENGINES",
    "Engine",
    "EngineError",
    "FrameEngine",
    "check_engine",
    "engine_named",
    "make_engine",
]
