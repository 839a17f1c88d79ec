"""Keeps what was cut off a graph, so that the file that is written has the outputs of the file that was read."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gemel.models.graph.document import NAMES, name_ends, parse_model
from gemel.models.graph.gate import GraphKind

MAX_TAIL_BYTES = 2**20
"""A larger end is not kept; the file that is written then ends where it was cut."""
OWN = "tail/"
"""Begins the names of values within the tail, so that none is one of the graph's."""


def take_tail(graph: ir.Graph, feeds: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> bytes:
    """What computes `outputs` from `feeds`, as an ONNX model; empty where it needs more than these, or is large."""
    try:
        tail = ir.convenience.extract(graph, feeds, outputs)
    except ValueError:  # it depends on other values of the picture
        return b""
    if any(isinstance(value.const_value, ir.ExternalTensor) for value in tail.initializers.values()):
        return b""
    tail.meta[NAMES] = graph.meta.get(NAMES)
    model = ir.Model(tail, ir_version=10)
    name_ends(model)
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    return data if len(data) <= MAX_TAIL_BYTES else b""


def append_tail(model: ir.Model, data: bytes, order: Sequence[str], given: Sequence[str], where: str) -> None:
    """Put a tail behind the outputs that feed it, in place; the model then has the outputs of `order`.

    With `given` it has these inputs.
    """
    part = parse_model(data, where, GraphKind.TAIL, keep_ends=True)
    graph, tail = model.graph, part.graph
    ends = {str(value.name): value for value in graph.outputs}
    own = {str(value.name): value for value in tail.inputs if value.name in given}
    fed = {value: ends[str(value.name)] for value in tail.inputs if value.name not in own}
    constants, nodes = list(tail.initializers.values()), list(tail)
    made = {str(value.name): value for value in tail.outputs}
    tail.initializers.clear()
    tail.outputs.clear()
    tail.inputs.clear()
    if given:
        own |= {str(value.name): value for value in graph.inputs}
        graph.inputs[:] = [own[name] for name in given]
    for value in (*constants, *(output for node in nodes for output in node.outputs)):
        if value.name and value.name not in made:
            value.name = f"{OWN}{value.name}"
    for node in nodes:
        node.name = f"{OWN}{node.name}"
    for value, end in fed.items():
        value.replace_all_uses_with(end)
    for value in constants:
        graph.register_initializer(value)
    tail.remove(nodes)
    graph.extend(nodes)
    graph.opset_imports.update({domain: version for domain, version in tail.opset_imports.items() if domain})
    graph.outputs[:] = [made.get(name) or ends[name] for name in order]
