"""The operators of ONNX (opset 11 to 23; models/graph/upgrade.py rewrites older ones) as functions of torch tensors."""

from gemel.models.graph.operators import arithmetic, layer_functions, recurrent, shapes
from gemel.models.graph.operators.operator_registry import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator", "arithmetic", "layer_functions", "recurrent", "shapes"]
