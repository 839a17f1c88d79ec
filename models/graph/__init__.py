"""Networks from ONNX and torch.export files: read as data, built as torch modules."""

from models.graph.document import Cut, Graph, TensorInfo
from models.graph.network import build_graph
from models.graph.reader import load_graph

__all__ = ["Cut", "Graph", "TensorInfo", "build_graph", "load_graph"]
