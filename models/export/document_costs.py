"""What a network costs to run, by its document: operations and the peak of its intermediates. Needs no torch.

Values differ a little from those of `models.export.cost`, which counts what PyTorch runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemel.models.bundle.manifest import BundleQuery
from gemel.models.bundle.query_documents import key_of_weight, refers_to_weights
from gemel.models.graph.work import count_products

if TYPE_CHECKING:
    import onnx

PRODUCTS = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
"""Operators whose operations count; others are memory traffic beside them."""
UNCALLED = frozenset({
    "Cast", "Constant", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Shape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that move values, and are no call of a layer."""
VALUE_BYTES = 4
AXIS = "gemel.first_axis"
"""The name of a value that no document has."""
Size = tuple[int, ...]


@dataclass(frozen=True)
class DocumentCost:
    """What one frame costs: operations (a multiply-add is 2), the peak of values that are needed at once, its input
    included and the weights not, and the layers called.

    `norms` are the paths of its BatchNorms; `layers` has the paths of modules with weights in order, each with the
    operations up to its end, and the whole pass without a path last.
    """

    flops: int
    workspace_bytes: int
    calls: int
    norms: frozenset[str]
    layers: tuple[tuple[str, int], ...]


_COSTS: dict[tuple[bytes, bool], DocumentCost] = {}
"""Of documents that were counted, by their digests."""


def count_document(query: BundleQuery, document: bytes) -> DocumentCost:
    """The cost of the network that the document of a query holds; values whose size is open count as nothing.

    Counted once for all queries with one document.
    """
    key = (hashlib.sha256(document).digest(), query.graph is not None)
    if key not in _COSTS:
        _COSTS[key] = _count(query, document)
    return _COSTS[key]


def _count(query: BundleQuery, document: bytes) -> DocumentCost:
    import onnx

    model = onnx.load_from_string(document)
    del model.graph.value_info[:]  # sizes of any batch
    for value in (*model.graph.input, *model.graph.output):
        batch = value.type.tensor_type.shape.dim[:1]
        for axis in batch:
            if axis.dim_param:
                axis.dim_value = 1
    model, sizes = _infer_sizes(model)
    if _unsqueeze_scalars(model, sizes):
        model, sizes = _infer_sizes(model)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer if refers_to_weights(tensor)}
    total = calls = 0
    layers: list[tuple[str, int]] = []
    norms = set()
    for node in graph.node:
        calls += node.op_type not in UNCALLED
        if node.op_type in PRODUCTS:
            total += _count_node(node, sizes)
        owners = {
            key_of_weight(query, name).rpartition(".")[0] for name in node.input if name in weights
        }
        layers += [(owner, total) for owner in sorted(owners) if owner]
        if node.op_type == "BatchNormalization":
            norms |= owners
    return DocumentCost(
        total, _count_live_bytes(graph, sizes), calls, frozenset(norms), (*layers, ("", total))
    )


def _infer_sizes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Size | None]]:
    """The model with the sizes of its values, and these by name; None where one is open."""
    import onnx

    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = model.graph
    sizes = {
        value.name: _size_of(value) for value in (*graph.input, *graph.output, *graph.value_info)
    }
    return model, sizes | {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}


def _unsqueeze_scalars(model: onnx.ModelProto, sizes: Mapping[str, Size | None]) -> bool:
    """Write each reshape of a scalar to one value as Unsqueeze: ONNX knows the values that come out of that alone.

    PyTorch's exporter writes a reshape to a computed batch so, and all sizes behind it would be open.
    """
    import onnx

    changed = [
        node
        for node in model.graph.node
        if node.op_type == "Reshape"
        and sizes.get(node.input[0]) == ()
        and sizes.get(node.output[0]) == (1,)
    ]
    for node in changed:
        node.op_type, node.input[1] = "Unsqueeze", AXIS
        del node.attribute[:]
    if changed:
        model.graph.initializer.append(
            onnx.helper.make_tensor(AXIS, onnx.TensorProto.INT64, (1,), (0,))
        )
        del model.graph.value_info[:]
    return bool(changed)


def _size_of(value: onnx.ValueInfoProto) -> Size | None:
    """The sizes of a value's axes; None where one is open."""
    sizes = tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
    return sizes if all(sizes) else None


def _count_node(node: onnx.NodeProto, sizes: Mapping[str, Size | None]) -> int:
    import onnx

    inputs = [sizes.get(name) for name in node.input]
    output = sizes.get(node.output[0])
    if output is None or inputs[0] is None:
        return 0
    options = {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if isinstance(options.get("equation"), bytes):
        options["equation"] = options["equation"].decode()
    return math.prod(output) * count_products(node.op_type, inputs, [output], options)


def _count_live_bytes(graph: onnx.GraphProto, sizes: Mapping[str, Size | None]) -> int:
    """The most bytes of values that are needed at once when nodes run in order."""
    last_use = {name: place for place, node in enumerate(graph.node) for name in node.input}
    last_use.update({output.name: len(graph.node) for output in graph.output})
    live = {value.name: _count_bytes(sizes[value.name]) for value in graph.input}
    peak = sum(live.values())
    for place, node in enumerate(graph.node):
        live.update({name: _count_bytes(sizes.get(name)) for name in node.output if name})
        peak = max(peak, sum(live.values()))
        for name in (*node.input, *node.output):
            if last_use.get(name, -1) <= place:
                live.pop(name, None)
    return peak


def _count_bytes(size: Size | None) -> int:
    return 0 if size is None else VALUE_BYTES * math.prod(size)
