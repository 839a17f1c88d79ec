"""The ONNX model of a stored graph with its weights, as its file had it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
import onnx_ir as ir
from torch import Tensor

from gemel.models.errors import InputError
from gemel.models.graph.document import is_weight, parse_model
from gemel.models.graph.gate import WHERE
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.graph.records import TensorInfo
from gemel.models.graph.stored import restore_graph, transposed_weights
from gemel.models.graph.tail import append_tail
from gemel.models.graph.unfold import fold_norms


def fill_graph(document: bytes, tensor_of: Callable[[str], Tensor], kept: Collection[str] = ()) -> ir.Model:
    """The ONNX model of a stored document with its weights, each by its key in a state dict, as the file had it.

    Norms are folded into their convolutions again, except for the paths in `kept`.
    """
    graph = restore_graph(document)
    cut, model = graph.cut, parse_model(graph.document, WHERE, keep_ends=True)
    model.metadata_props.update(graph.metadata)
    transposed = transposed_weights(ProtoGraph(onnx.load_from_string(graph.document)))
    for value in model.graph.initializers.values():
        if is_weight(value):
            tensor = tensor_of(str(value.name)).detach()
            tensor = tensor.t() if value.name in transposed else tensor
            value.const_value = ir.tensor(tensor.contiguous().numpy(), name=value.name)
    fold_norms(model, kept)
    if graph.given is not None:
        _give_input(model.graph, graph.given)
    if graph.led:
        _drop_batch(model.graph, graph.led)
    if cut is not None and cut.tail:
        try:
            append_tail(model, cut.tail, cut.order, cut.given, WHERE)
        except (KeyError, ValueError) as error:
            raise InputError(WHERE, f"has an end that does not fit: {error}", "build the bundle again") from error
    return model


def _give_input(graph: ir.Graph, given: TensorInfo) -> None:
    """Let a graph of f32 (N, 3, H, W) take what its file took."""
    (old,) = graph.inputs
    dtype = ir.DataType.UINT8 if given.dtype == "uint8" else ir.DataType.FLOAT
    new = ir.Value(name=given.name, shape=ir.Shape(given.shape), type=ir.TensorType(dtype))
    nodes, value = [], new
    if dtype != ir.DataType.FLOAT:
        nodes.append(ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name="cast_input"))
        value = nodes[-1].outputs[0]
    sizes = given.shape
    if len(sizes) == 3:
        axis = ir.node("Constant", [], {"value": ir.tensor(np.array([0]))}, name="batch_axis")
        is_input = graph.opset_imports.get("", 0) >= 13  # an attribute before
        inputs, options = ([value, axis.outputs[0]], {}) if is_input else ([value], {"axes": [0]})
        nodes += [axis] if is_input else []
        nodes.append(ir.node("Unsqueeze", inputs, options, name="with_batch"))
        value, sizes = nodes[-1].outputs[0], (1, *sizes)
    if sizes[1] not in (1, 3):
        nodes.append(ir.node("Transpose", [value], {"perm": [0, 3, 1, 2]}, name="channels_first"))
        value, sizes = nodes[-1].outputs[0], (sizes[0], sizes[3], *sizes[1:3])
    if sizes[1] == 1:
        nodes.append(ir.node("Concat", [value] * 3, {"axis": 1}, name="grey_thrice"))
        value = nodes[-1].outputs[0]
    if not nodes:
        return
    old.replace_all_uses_with(value)
    graph.insert_before(graph[0], nodes)
    graph.inputs[:] = [new]


def _drop_batch(graph: ir.Graph, led: Collection[str]) -> None:
    """Let the outputs have the axes of the file's, which takes one picture at a time."""
    for place, output in enumerate(list(graph.outputs)):
        if output.name not in led or output.shape is None:
            continue
        sizes = ir.tensor([int(size) for size in output.shape[1:]], name=f"{output.name}_sizes")  # type: ignore[arg-type]
        target = ir.Value(
            name=sizes.name, const_value=sizes, shape=ir.Shape([len(output.shape) - 1]), type=ir.TensorType(sizes.dtype)
        )
        graph.register_initializer(target)
        node = ir.node("Reshape", [output, target], name=f"{output.name}_of_one")
        made = node.outputs[0]
        made.name, output.name = output.name, f"{output.name}_of_batch"
        made.shape, made.type = ir.Shape(output.shape[1:]), output.type
        graph.append(node)
        graph.outputs[place] = made
