"""A graph file once it is read: its model past the gate, and what its values and nodes are called. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import onnx_ir as ir

from gemel.models.errors import InputError, message_of
from gemel.models.graph.document_bounds import HINT
from gemel.models.graph.gate import (
    WEIGHTS,
    GatedGraph,
    GraphKind,
    admit_graph,
    describe_operator,
    write_model,
)

logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # it warns of what the reader refuses
MAX_TENSOR_BYTES = 2**32
TEXT, NAMES = "text", "names"
"""In the meta of a value or node its name in the file; in that of a graph the names of all by their numbers."""


def parse_model(
    data: bytes, where: str, kind: GraphKind = GraphKind.DOCUMENT, keep_ends: bool = False
) -> ir.Model:
    """A gated ONNX model from its bytes, its props the file's; InputError for one that the gate refuses.

    Its values and nodes are called by numbers, with `keep_ends` all but its inputs and outputs; `text_of` is what the
    file calls them.
    """
    return read_gated(admit_graph(data, where, kind, keep_ends), where)


def write_document(model: ir.Model) -> bytes:
    """The bytes of a document: equal for equal graphs, whatever their nodes and inner values are called."""
    return write_model(ir.to_proto(model), model.metadata_props)


def read_gated(gated: GatedGraph, where: str) -> ir.Model:
    """The model of a gated graph, with the file's names beside its own."""
    try:
        model: ir.Model = ir.from_proto(gated.model)  # type: ignore[assignment]
    except Exception as error:  # what onnx-ir raises for a malformed graph has no common class
        raise InputError(where, f"its graph is malformed: {message_of(error)}", HINT) from error
    model.metadata_props.update(gated.metadata)
    note_texts(model.graph, gated.names)
    return model


def note_texts(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Let `text_of` know the names of a graph and of its branches."""
    graph.meta[NAMES] = names
    # Some of them leave the graph before they are named.
    for value in (
        *graph.inputs,
        *graph.initializers.values(),
    ):
        value.meta[TEXT] = names.get(str(value.name), value.name)
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                note_texts(attribute.value, names)


def text_of(item: ir.Value | ir.Node, graph: ir.Graph | None = None) -> str:
    """What the file calls a value or a node of a graph; for one that it does not have, the name that it was given."""
    text = item.meta.get(TEXT)
    if text is None:
        home = graph or item.graph
        names = home.meta.get(NAMES) if home is not None else None
        text = (names or {}).get(item.name, "" if isinstance(item, ir.Node) else item.name)
    return str(text or "")


def keep_text(item: ir.Value | ir.Node) -> None:
    """Let a value or node keep its name in the file when it gets another number, or leaves its graph."""
    item.meta[TEXT] = text_of(item)


def source_of(value: ir.Value) -> str:
    """The file's name of what a constant was computed from, else its own."""
    return str(value.meta.get("source") or text_of(value))


def pass_name(old: ir.Value, new: ir.Value, suffix: str) -> None:
    """Give `new` the names of `old`, which gets a suffix."""
    new.name, new.meta[TEXT] = old.name, text_of(old)
    old.name, old.meta[TEXT] = f"{old.name}{suffix}", f"{text_of(old)}{suffix}"


def name_ends(model: ir.Model) -> None:
    """Give the inputs and outputs of a gated model the file's names again; what has one of these gets another."""
    graph = model.graph
    ends = {value: text_of(value) for value in (*graph.inputs, *graph.outputs)}
    texts = set(ends.values())
    inner = (*graph.initializers.values(), *(output for node in graph for output in node.outputs))
    taken = texts | {str(value.name) for value in (*ends, *inner)}
    for value in inner:
        if value not in ends and value.name in texts:
            name = f"{value.name}_"
            while name in taken:
                name += "_"
            taken.add(name)
            value.name = name
    for number, value in enumerate(ends):
        value.name = f"{number}/"  # so that none has the name that another one gets
    for value, text in ends.items():
        value.name = text


def is_weight(value: ir.Value) -> bool:
    """Whether a document has its values elsewhere."""
    return (
        isinstance(value.const_value, ir.ExternalTensor)
        and str(value.const_value.location) == WEIGHTS
    )


def describe_node(node: ir.Node) -> str:
    """An operator and its node, for messages."""
    return describe_operator(node, text_of(node))
