"""How large an ONNX model may be: counted in its bytes before it is parsed, and once its functions were inlined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx

from gemel.models.errors import InputError

MIN_OPSET, MAX_OPSET = 7, 23
MAX_FILE_BYTES = 2**31 - 1
"""What one protobuf message can hold."""
MAX_NODES = 100_000
"""Of a graph with its functions inlined; the largest model of the corpus has 6,000."""
MAX_TENSORS = 100_000
MAX_FIELDS = 4_000_000
MAX_DEPTH = 30
"""Of functions that call others, and of branches within branches."""
HINT = "export it again, e.g. with torch.onnx.export(model.eval(), picture, 'model.onnx', opset_version=18)"

_MODEL: Any = onnx.ModelProto.DESCRIPTOR
_NODE: str = onnx.NodeProto.DESCRIPTOR.full_name  # type: ignore[union-attr]
_TENSOR: str = onnx.TensorProto.DESCRIPTOR.full_name  # type: ignore[union-attr]


def _list_inner_messages() -> dict[str, dict[int, str]]:
    """By name of a message of onnx.proto the fields that hold messages, with their names."""
    inner: dict[str, dict[int, str]] = {}
    pending = [_MODEL]
    while pending:
        message = pending.pop()
        if message.full_name in inner:
            continue
        fields = [field for field in message.fields if field.message_type is not None]
        inner[message.full_name] = {field.number: field.message_type.full_name for field in fields}
        pending += [field.message_type for field in fields]
    return inner


_INNER = _list_inner_messages()


def check_fields(data: bytes, where: str) -> None:
    """Refuse bytes that have too many parts, before protobuf makes objects of them."""
    pending = [(_MODEL.full_name, 0, len(data))]
    count = nodes = tensors = 0
    while pending:
        message, at, end = pending.pop()
        inner_messages = _INNER[message]
        while at < end:
            key, at = _read_varint(data, at, end)
            size = 0
            wire = key & 7
            if wire == 2:
                size, at = _read_varint(data, at, end)
                inner = inner_messages.get(key >> 3)
                if inner is not None:
                    pending.append((inner, at, min(at + size, end)))
                    nodes += inner == _NODE
                    tensors += inner == _TENSOR
            elif wire == 0:
                _, at = _read_varint(data, at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                return  # protobuf itself refuses groups and unknown kinds
            at += size
            count += 1
            if nodes > MAX_NODES or tensors > MAX_TENSORS or count > MAX_FIELDS:
                problem = f"has more than {MAX_NODES} nodes, {MAX_TENSORS} tensors or {MAX_FIELDS} parts of them"
                raise InputError(where, problem, HINT)


def _read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


Key = tuple[str, str, str]
"""A function's domain, name and overload."""


def count_nodes(model: onnx.ModelProto, where: str) -> int:
    """The nodes of a model once its functions are inlined, each function counted once.

    Raises InputError for too many, for too deep a nesting, and for a function that calls itself.
    """
    functions = {
        (function.domain, function.name, function.overload): function
        for function in model.functions
    }
    total = _count(model.graph.node, functions, {}, where, 0)
    if total > MAX_NODES:
        raise InputError(where, f"has {total} nodes and {MAX_NODES} are read", HINT)
    return total


def _count(
    nodes: Iterable[Any],
    functions: Mapping[Key, onnx.FunctionProto],
    totals: dict[Key, int | None],
    where: str,
    depth: int,
) -> int:
    """Nodes with those of functions and branches; `totals` has None for a function that is being counted."""
    if depth > MAX_DEPTH:
        raise InputError(
            where, f"has functions or branches nested more than {MAX_DEPTH} deep", HINT
        )
    count = 0
    for node in nodes:
        count += 1
        key = (node.domain, node.op_type, node.overload)
        if key in functions:
            if key not in totals:
                totals[key] = None
                totals[key] = _count(functions[key].node, functions, totals, where, depth + 1)
            total = totals[key]
            if total is None:
                raise InputError(where, f"has a function '{node.op_type}' that calls itself", HINT)
            count += total
        for attribute in node.attribute:
            if attribute.HasField("g"):
                count += _count(attribute.g.node, functions, totals, where, depth + 1)
            for graph in attribute.graphs:
                count += _count(graph.node, functions, totals, where, depth + 1)
    return count
