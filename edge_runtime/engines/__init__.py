"""Engines by name, each an architecture without weights that is bound to tensors of the arena."""

from edge_runtime.engines.base import Engine, EngineError, FrameEngine, TensorOf, Wait
from edge_runtime.engines.registry import AUTO, ENGINES, check_engine, engine_named, make_engine

__all__ = [
    "AUTO",
    "ENGINES",
    "Engine",
    "EngineError",
    "FrameEngine",
    "TensorOf",
    "Wait",
    "check_engine",
    "engine_named",
    "make_engine",
]
