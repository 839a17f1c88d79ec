"""Reads a stranger's graph in a confined child, and takes its answer by the gate for stored documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gemel.models.errors import InputError
from gemel.models.files.confined import run_confined
from gemel.models.graph.records import Graph
from gemel.models.graph.stored import restore_graph

PACK_GRAPH = "gemel.models.graph.packing:pack_graph"
"""What the child calls; its module imports the reader, which imports this one."""
DOCUMENT, STATE = "document", "state."
"""The name of the document in an answer, and what begins the names of the weights."""
PROGRAM_SUFFIX = ".pt2"
"""Of files that have all their weights inside; those of others may be beside them."""


def load_confined(path: Path, size: tuple[int, int] | None) -> Graph:
    """The graph of an .onnx or .pt2 file; InputError as `read_graph`, and where the child passes a limit."""
    answer = run_confined(PACK_GRAPH, [str(path), size], path, beside=path.suffix != PROGRAM_SUFFIX)
    try:
        document = answer.tensors[DOCUMENT].numpy().tobytes()
    except KeyError as error:
        raise InputError(path, "its reader gave no graph", "do not use this file") from error
    state = {
        name.removeprefix(STATE): tensor
        for name, tensor in answer.tensors.items()
        if name.startswith(STATE)
    }
    return replace(restore_graph(document), state=state)
