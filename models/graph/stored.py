"""A graph as a bundle holds it: one document with the file's metadata and what was cut off, and without weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

import onnx_ir as ir
from onnx_ir.tensor_adapters import to_torch_dtype
from pydantic import TypeAdapter
from torch import Tensor

from models.errors import InputError
from models.graph.document import Cut, Graph, TensorInfo, attributes_of, parse_model
from models.graph.tail import append_tail
from models.graph.unfold import WHERE, fold_norms, is_weight

_CUT = TypeAdapter(Cut)
_GIVEN = TypeAdapter(TensorInfo)
_LED = TypeAdapter(tuple[str, ...])
CUT_KEY, GIVEN_KEY, LED_KEY = KEYS = "gemel.cut", "gemel.input", "gemel.led"
"""The metadata keys of what was cut off, of the input of the file, and of outputs that a batch leads, JSON."""


def store_graph(graph: Graph) -> bytes:
    """The document of a graph with its metadata and its cut inside."""
    model = parse_model(graph.document, WHERE)
    model.metadata_props.update(graph.metadata)
    for key in KEYS:
        model.metadata_props.pop(key, None)
    if graph.led:
        model.metadata_props[LED_KEY] = json.dumps(graph.led)
    if graph.cut is not None:
        model.metadata_props[CUT_KEY] = _CUT.dump_json(graph.cut).decode()
    if graph.given is not None:
        model.metadata_props[GIVEN_KEY] = _GIVEN.dump_json(graph.given).decode()
    return ir.to_proto(model).SerializeToString(deterministic=True)


def restore_graph(document: bytes) -> Graph:
    """Inverse of `store_graph`, with an empty state. Raises InputError for a document that is damaged."""
    model = parse_model(document, WHERE)
    metadata = dict(model.metadata_props)
    text, said, names = (metadata.pop(key, None) for key in KEYS)
    try:
        cut = None if text is None else _CUT.validate_json(text)
        given = None if said is None else _GIVEN.validate_json(said)
        led = () if names is None else _LED.validate_json(names)
        infos = [_describe(value) for value in (*model.graph.inputs, *model.graph.outputs)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(WHERE, f"is malformed: {error}", "copy or build the bundle again") from error
    if len(model.graph.inputs) != 1 or not model.graph.outputs:
        raise InputError(WHERE, "has not one input and outputs", "copy or build the bundle again")
    return Graph(document, {}, infos[0], tuple(infos[1:]), metadata, cut, given, led)


def fill_graph(document: bytes, tensor_of: Callable[[str], Tensor], kept: Collection[str] = ()) -> ir.Model:
    """The ONNX model of a stored document with its weights, each by its key in a state dict, as the file had it.

    Norms are folded into their convolutions again, except for the paths in `kept`.
    """
    model, graph = parse_model(document, WHERE), restore_graph(document)
    cut = graph.cut
    for key in KEYS:
        model.metadata_props.pop(key, None)
    transposed = transposed_weights(model)
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


def transposed_weights(model: ir.Model) -> set[str]:
    """The weights that a document's nodes read transposed: those of linear layers are (out, in) in a state dict."""
    return {
        str(node.inputs[1].name)
        for node in model.graph
        if (node.op_type == "MatMul" or (node.op_type == "Gemm" and not attributes_of(node).get("transB")))
        and node.inputs[1] is not None
        and is_weight(node.inputs[1])
        and len(node.inputs[1].shape or ()) == 2
    }


def _give_input(graph: ir.Graph, given: TensorInfo) -> None:
    """Let a graph of f32 (N, 3, H, W) take what its file took."""
    (old,) = graph.inputs
    dtype = ir.DataType.UINT8 if given.dtype == "uint8" else ir.DataType.FLOAT
    new = ir.Value(name=given.name, shape=ir.Shape(given.shape), type=ir.TensorType(dtype))
    nodes, value = [], new
    if dtype != ir.DataType.FLOAT:
        nodes.append(ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name="cast_input"))
        value = nodes[-1].outputs[0]
    if given.shape[1:2] != old.shape[1:2]:  # type: ignore[index]
        nodes.append(ir.node("Transpose", [value], {"perm": [0, 3, 1, 2]}, name="channels_first"))
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


def _describe(value: ir.Value) -> TensorInfo:
    if value.shape is None or value.dtype is None:
        raise ValueError(f"'{value.name}' has no shape")
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return TensorInfo(str(value.name), str(to_torch_dtype(value.dtype)).removeprefix("torch."), shape)
