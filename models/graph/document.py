"""What a graph file holds once it is read: its values, its limits, and its tensors and attributes as torch has them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from google.protobuf.message import DecodeError
from pydantic import Base64Bytes
from torch import Tensor

from models.errors import InputError

logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # it warns of what the reader refuses
MIN_OPSET, MAX_OPSET = 7, 23
MAX_FILE_BYTES = 2**31 - 1
"""What one protobuf message can hold."""
MAX_NODES = 100_000
"""Of a graph with its functions inlined; the largest model of the corpus has 6,000."""
MAX_FIELDS = 4_000_000
MAX_TENSOR_BYTES = 2**32
HINT = "export it again, e.g. with torch.onnx.export(model.eval(), picture, 'model.onnx', opset_version=18)"
WEIGHTS = "weights.bin"
"""Where a document says that its weights are."""
BUFFER = "buffer"
"""The doc_string of a weight that is not trained."""


@dataclass(frozen=True)
class TensorInfo:
    """An input or output: `shape` as integers, "batch" for a size that is free."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Cut:
    """What was cut off at the end: its first operator and node, its attributes and constant inputs by name.

    `inputs` are the names of the outputs that now feed it, in its order; `outputs` are those that it gave. `tail` is
    the part itself as an ONNX model, `order` the names of the file's outputs; both are empty where it was not kept.
    `given` are the names of the file's inputs, where the part reads others than the picture.
    """

    operator: str
    node: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    tail: Base64Bytes = b""
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A network read from a file. `document` is an ONNX model without weights, each named by its key in `state`.

    Its shapes are fixed but for the batch. `metadata` are the file's metadata_props. `given` is the input of a file
    that takes (N, H, W, 3) or integers, where the document takes f32 (N, 3, H, W). `led` are the outputs whose first
    axis, the batch, the file's own do not have.
    """

    document: bytes
    state: dict[str, Tensor]
    input: TensorInfo
    outputs: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    cut: Cut | None = None
    given: TensorInfo | None = None
    led: tuple[str, ...] = ()


def parse_model(data: bytes, where: str) -> ir.Model:
    """An ONNX model from its bytes, within limits; InputError for anything else."""
    check_fields(data, where)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise InputError(where, "is damaged or is no ONNX file", HINT) from error
    if not proto.HasField("graph") or not proto.graph.node:
        raise InputError(where, "is no ONNX file, or one without a graph", HINT)
    check_model(proto, where)
    try:
        return ir.from_proto(proto)  # type: ignore[return-value]
    except Exception as error:  # what onnx-ir raises for a malformed graph has no common class
        raise InputError(where, f"its graph is malformed: {error}", HINT) from error


_MODEL, _GRAPH, _FUNCTION, _NODE, _ATTRIBUTE = range(5)
_INNER = {
    (_MODEL, 7): _GRAPH, (_MODEL, 25): _FUNCTION, (_GRAPH, 1): _NODE, (_FUNCTION, 7): _NODE, (_NODE, 5): _ATTRIBUTE,
    (_ATTRIBUTE, 6): _GRAPH, (_ATTRIBUTE, 11): _GRAPH,
}  # fmt: skip
"""The fields of onnx.proto that hold nodes."""


def check_fields(data: bytes, where: str) -> None:
    """Refuse bytes whose graph has too many parts, before protobuf makes objects of them."""
    left, count, nodes = [(_MODEL, 0, len(data))], 0, 0
    while left:
        kind, at, end = left.pop()
        while at < end:
            key, at = _varint(data, at, end)
            size, wire = 0, key & 7
            if wire == 2:
                size, at = _varint(data, at, end)
                inner = _INNER.get((kind, key >> 3))
                if inner is not None:
                    left.append((inner, at, min(at + size, end)))
                    nodes += inner == _NODE
            elif wire == 0:
                _, at = _varint(data, at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                return  # protobuf itself refuses groups and unknown kinds
            at += size
            count += 1
            if nodes > MAX_NODES or count > MAX_FIELDS:
                raise InputError(where, f"has more than {MAX_NODES} nodes, or {MAX_FIELDS} parts of them", HINT)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


def check_model(proto: onnx.ModelProto, where: str) -> None:
    """Refuse an opset that is too old or too new, and graphs of too many nodes."""
    opset = max((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), default=0)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise InputError(
            where, f"is of opset {opset}, and opsets {MIN_OPSET} to {MAX_OPSET} are read", "export it with opset 18"
        )
    counts = {(one.domain, one.name): one for one in proto.functions}
    total = _count_nodes(proto.graph.node, counts, {}, where, 0)
    if total > MAX_NODES:
        raise InputError(where, f"has {total} nodes and {MAX_NODES} are read", HINT)


def _count_nodes(nodes: Any, functions: dict, known: dict, where: str, depth: int) -> int:
    """Nodes once functions are inlined."""
    if depth > 30:
        raise InputError(where, "has functions or branches nested more than 30 deep", HINT)
    total = 0
    for node in nodes:
        total += 1
        key = (node.domain, node.op_type)
        if key in functions:
            if key not in known:
                known[key] = _count_nodes(functions[key].node, functions, known, where, depth + 1)
            total += known[key]
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            total += sum(_count_nodes(graph.node, functions, known, where, depth + 1) for graph in graphs)
    return total


def to_torch(array: np.ndarray) -> Tensor:
    """An array as a tensor of its own memory; half precision as float32, four bits as eight."""
    if array.dtype.name in ("float16", "bfloat16") or array.dtype.name.startswith("float8"):
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype.name in ("int4", "int2"):
        return torch.from_numpy(array.astype(np.int8))
    if array.dtype.name in ("uint4", "uint2"):
        return torch.from_numpy(array.astype(np.uint8))
    return torch.from_numpy(np.array(array, order="C"))


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as Python values; a tensor becomes a torch tensor."""
    found = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = to_torch(value.numpy())
        elif attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            value = list(value)
        found[name] = value
    return found


def describe_node(node: ir.Node) -> str:
    """An operator and its node, for messages."""
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{name} (node '{node.name}')" if node.name else name
