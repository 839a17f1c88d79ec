"""Keeps what was cut off a graph, so that the file that is written has the outputs of the file that was read."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gemel.models.graph.document import NAMES, name_ends

MAX_TAIL_BYTES = 2**20
"""A larger end is not kept; the file that is written then ends where it was cut."""


def take_tail(graph: ir.Graph, feeds: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> bytes:
    """What computes `outputs` from `feeds`, as an ONNX model; empty where it needs more than these, or is large."""
    try:
        tail = ir.convenience.extract(graph, feeds, outputs)
    except ValueError:  # it depends on other values of the picture
        return b""
    if any(
        isinstance(value.const_value, ir.ExternalTensor) for value in tail.initializers.values()
    ):
        return b""
    tail.meta[NAMES] = graph.meta.get(NAMES)
    model = ir.Model(tail, ir_version=10)
    name_ends(model)
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    return data if len(data) <= MAX_TAIL_BYTES else b""
