"""A graph as a bundle holds it: one document with the file's metadata and what was cut off, and without weights.

Needs no torch.
"""

from __future__ import annotations

import json

import onnx
from onnx import helper
from pydantic import TypeAdapter

from gemel.models.errors import InputError
from gemel.models.graph.gate import DAMAGED, WHERE, GatedGraph, GraphKind, admit_graph, write_model
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.graph.records import Cut, Graph, TensorInfo

_CUT = TypeAdapter(Cut)
_GIVEN = TypeAdapter(TensorInfo)
_LED = TypeAdapter(tuple[str, ...])
CUT_KEY, GIVEN_KEY, LED_KEY = KEYS = "gemel.cut", "gemel.input", "gemel.led"
"""The metadata keys of what was cut off, of the input of the file, and of outputs that a batch leads, JSON."""


def store_graph(graph: Graph) -> bytes:
    """The document of a graph with its metadata and its cut inside."""
    model = _admit(graph.document).model
    metadata = {key: text for key, text in graph.metadata.items() if key not in KEYS}
    if graph.led:
        metadata[LED_KEY] = json.dumps(graph.led)
    if graph.cut is not None:
        metadata[CUT_KEY] = _CUT.dump_json(graph.cut).decode()
    if graph.file_input is not None:
        metadata[GIVEN_KEY] = _GIVEN.dump_json(graph.file_input).decode()
    return write_model(model, metadata)


def restore_graph(document: bytes) -> Graph:
    """Inverse of `store_graph`, with an empty state. Raises InputError for a document that is damaged."""
    gated = _admit(document)
    model = gated.model
    metadata = gated.metadata
    text, input_text, names = (metadata.pop(key, None) for key in KEYS)
    try:
        cut = None if text is None else _CUT.validate_json(text)
        file_input = None if input_text is None else _GIVEN.validate_json(input_text)
        led = () if names is None else _LED.validate_json(names)
        infos = [_describe(value) for value in (*model.graph.input, *model.graph.output)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(WHERE, f"is malformed: {error}", DAMAGED) from error
    if len(model.graph.input) != 1 or not model.graph.output:
        raise InputError(WHERE, "has not one input and outputs", DAMAGED)
    return Graph(
        write_model(model, {}), {}, infos[0], tuple(infos[1:]), metadata, cut, file_input, led
    )


def transposed_weights(graph: ProtoGraph) -> set[str]:
    """The weights that the document of an imported graph reads transposed: a state dict has (out, in)."""
    names = set()
    for node in graph.nodes:
        if node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
            continue
        weight = graph.constants.get(node.inputs[1])
        is_turned = node.op_type == "Gemm" and bool(node.attribute("transB", 0))
        # Only weights of two axes are stored turned.
        if weight is not None and weight.array is None and len(weight.shape) == 2 and not is_turned:
            names.add(node.inputs[1])
    return names


def _admit(document: bytes) -> GatedGraph:
    return admit_graph(document, WHERE, GraphKind.DOCUMENT, keep_ends=True)


def _describe(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise ValueError(f"'{value.name}' has no shape")
    shape = tuple(
        axis.dim_value if axis.HasField("dim_value") else axis.dim_param
        for axis in tensor.shape.dim
    )
    return TensorInfo(value.name, helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape)
