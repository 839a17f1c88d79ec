"""Engines by name, each an architecture without weights that is bound to tensors of the arena."""

from edge_runtime.engines.base import Engine, FrameEngine, TensorOf, Wait
from edge_runtime.engines.registry import AUTO, ENGINES, engine_named, make_engine

__all__ = ["AUTO", "ENGINES", "Engine", "FrameEngine", "TensorOf", "Wait", "engine_named", "make_engine"]
