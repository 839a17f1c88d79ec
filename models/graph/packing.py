"""In a confined child: reads a stranger's graph and packs it as the document that a bundle would hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch

from gemel.models.bundle.format import has_code
from gemel.models.errors import InputError
from gemel.models.files.confined_server import ConfinedResult
from gemel.models.graph.confined_graph import DOCUMENT, STATE
from gemel.models.graph.document_bounds import HINT
from gemel.models.graph.onnx_reader import read_graph, read_onnx
from gemel.models.graph.stored import store_graph


def pack_graph(path: str, size: Sequence[int] | None) -> ConfinedResult:
    """The graph as the document that a bundle would hold, and its weights."""
    graph = read_graph(path, None if size is None else (size[0], size[1]))
    for name, tensor in graph.state.items():
        if not has_code(tensor.dtype):
            raise InputError(path, f"the weight '{name}' holds {tensor.dtype}", HINT)
    document = torch.from_numpy(np.frombuffer(bytearray(store_graph(graph)), np.uint8))
    return ConfinedResult(
        None,
        {DOCUMENT: document, **{f"{STATE}{name}": tensor for name, tensor in graph.state.items()}},
    )


def warm_up() -> None:
    """Read a small graph, in the process that children are forks of."""
    tensor = onnx.TensorProto.FLOAT
    make = onnx.helper.make_tensor_value_info
    kernel = onnx.numpy_helper.from_array(np.ones((1, 3, 1, 1), np.float32), "kernel")
    nodes = [
        onnx.helper.make_node("Conv", ["x", "kernel"], ["y"]),
        onnx.helper.make_node("Relu", ["y"], ["z"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [make("x", tensor, ["n", 3, 8, 8])],
        [make("z", tensor, ["n", 1, 8, 8])],
        [kernel],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8
    )
    store_graph(read_onnx(model.SerializeToString, Path("warm")))
