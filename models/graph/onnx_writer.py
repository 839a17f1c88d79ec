"""Writes a graph as an ONNX file: its document with the weights and the metadata in it."""

from __future__ import annotations

from pathlib import Path

from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic
from gemel.models.graph.document_bounds import MAX_FILE_BYTES
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.records import Graph
from gemel.models.graph.stored import store_graph


def write_graph(path: str | Path, graph: Graph, overwrite: bool = True) -> None:
    """Write a graph with the end and the input of its file, norms folded.

    Raises InputError when it cannot be written, or is too large for one file.
    """
    nbytes = len(graph.document) + sum(tensor.nbytes for tensor in graph.state.values())
    if nbytes > MAX_FILE_BYTES:
        raise InputError(path, f"{nbytes} bytes do not fit one ONNX file", "it can hold 2 GiB")
    model = fill_graph(store_graph(graph), lambda key: graph.state[key].detach().cpu().numpy())
    with open_atomic(path, overwrite) as file:
        file.write(model.to_proto().SerializeToString(deterministic=True))
