"""Puts weights into a stored document: the file that it came from, with what a merge changed. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from gemel.models.errors import InputError
from gemel.models.graph.gate import WHERE, GraphKind, admit_graph
from gemel.models.graph.proto_graph import ProtoGraph, ProtoNode, make_node, refer_to_file
from gemel.models.graph.records import ONES, SUFFIX, ZEROS, Cut, TensorInfo
from gemel.models.graph.stored import restore_graph, transposed_weights

BATCH = "batch"
TAIL = "tail/"
"""Begins the names of values within the end that was cut off, so that none is one of the graph's."""
MIN_BYTES = 1024
"""Larger constants are no shapes, which sizes could follow from."""


def fill_graph(
    document: bytes,
    array_of: Callable[[str], np.ndarray],
    unfolded: Collection[str] = (),
    is_imported: bool = True,
    batch: int | str | None = None,
) -> ProtoGraph:
    """The ONNX model of a stored document with its weights, each by its name in the document.

    Where `is_imported` these are of a state dict that was read from a file, and the model is that file again: norms
    are folded into their convolutions, except for the paths in `unfolded`. `batch` is N or "batch" in place of the
    file's.
    Raises InputError for a batch that the graph does not take.
    """
    stored = restore_graph(document)
    graph = ProtoGraph(onnx.load_from_string(stored.document))
    graph.metadata.update(stored.metadata)
    transposed = transposed_weights(graph) if is_imported else set()
    for name, constant in list(graph.constants.items()):
        if constant.array is None:
            graph.add_constant(name, array_of(name).T if name in transposed else array_of(name))
    fold_norms(graph, unfolded)
    file_input = stored.file_input or stored.input
    _give_input(graph, _with_batch(file_input, stored.input.shape[0], batch))
    _drop_batch(graph, stored.led)
    if stored.cut is not None and stored.cut.tail:
        try:
            _append_tail(graph, stored.cut)
        except (KeyError, ValueError) as error:
            raise InputError(
                WHERE, f"has an end that does not fit: {error}", "build the bundle again"
            ) from error
    _declare_outputs(graph)
    return graph


# Norms


def fold_norms(graph: ProtoGraph, unfolded: Collection[str]) -> None:
    """Inverse of `unfold_norms`, in place, for a model with its weights; norms at the `unfolded` paths stay apart."""
    for affine in [node for node in graph.nodes if _is_affine(node)]:
        conv = graph.producer(affine.inputs[0])
        scale = affine.inputs[1]
        path = scale.removesuffix(f"{SUFFIX}.weight")
        # It is read with other scales elsewhere: folded, its weight would be stored twice.
        if conv is None or path in unfolded:
            continue
        folded = f"{path}.folded"
        if folded not in graph.constants:
            weight, factors = (graph.constants[name].array for name in (conv.inputs[1], scale))
            assert weight is not None and factors is not None
            graph.add_constant(folded, weight * factors.reshape(-1, 1, 1, 1))
        graph.set_inputs(conv, (conv.inputs[0], folded, affine.inputs[2]))
        graph.remove(affine)
        graph.set_output(conv, affine.outputs[0])
    graph.remove_unused_constants()
    names = {
        name: f"{name.removesuffix('.folded')}.weight"
        for name in graph.constants
        if name.endswith(".folded")
    }
    for name in graph.constants:
        path = name.removesuffix(f"{SUFFIX}.bias")
        if path != name and f"{path}{SUFFIX}.weight" not in graph.constants:
            names[name] = f"{path}.bias"
    graph.rename(names)


def _is_affine(node: ProtoNode) -> bool:
    return node.op_type == "BatchNormalization" and all(
        name.startswith(prefix) for name, prefix in zip(node.inputs[3:], (ZEROS, ONES), strict=True)
    )


# Inputs and outputs


def _with_batch(
    file_input: TensorInfo, graph_batch: int | str, batch: int | str | None
) -> TensorInfo:
    """The input of the file with another batch, where the graph, whose batch is `graph_batch`, takes it."""
    if batch is None:
        return file_input
    if isinstance(batch, int) and batch < 1:
        raise InputError(
            WHERE, f"a batch of {batch} holds nothing", "give 1 or more, or 'dynamic'", "batch"
        )
    graph_batch = graph_batch if len(file_input.shape) == 4 else 1
    if isinstance(graph_batch, int) and batch != graph_batch:
        raise InputError(WHERE, f"takes batches of {graph_batch}", "leave this out", "batch")
    return (
        TensorInfo(file_input.name, file_input.dtype, (batch, *file_input.shape[1:]))
        if len(file_input.shape) == 4
        else file_input
    )


def _give_input(graph: ProtoGraph, file_input: TensorInfo) -> None:
    """Let a graph of f32 (N, 3, H, W) take what its file took."""
    (old,) = graph.inputs
    dtype = TensorProto.UINT8 if file_input.dtype == "uint8" else TensorProto.FLOAT
    graph.inputs = [helper.make_tensor_value_info(file_input.name, dtype, file_input.shape)]
    nodes: list[ProtoNode] = []

    def put(operator: str, inputs: Sequence[str], attributes: dict[str, object]) -> str:
        nodes.append(make_node(operator, inputs, f"input/{len(nodes)}", attributes))
        return nodes[-1].outputs[0]

    value = file_input.name
    sizes = file_input.shape
    if dtype != TensorProto.FLOAT:
        value = put("Cast", [value], {"to": TensorProto.FLOAT})
    if len(sizes) == 3:
        is_input = graph.opset >= 13  # an attribute before
        axes = [graph.add_constant("input/axis", np.array([0]))] if is_input else []
        value = put("Unsqueeze", [value, *axes], {} if is_input else {"axes": [0]})
        sizes = (1, *sizes)
    # Channels are last.
    if sizes[1] not in (1, 3):
        value = put("Transpose", [value], {"perm": [0, 3, 1, 2]})
        sizes = (sizes[0], sizes[3], *sizes[1:3])
    # A grey picture three times: the graph takes its luma.
    if sizes[1] == 1:
        value = put("Concat", [value] * 3, {"axis": 1})
    if nodes:
        graph.replace_reads(old.name, value)
        graph.insert(0, nodes)


def _drop_batch(graph: ProtoGraph, led: Collection[str]) -> None:
    """Let the outputs have the axes of the file's, which takes one picture at a time."""
    for output in graph.outputs:
        name = output.name
        sizes = graph.sizes.get(output.name)
        # Only outputs whose batch was put first when the file was read.
        if name not in led or sizes is None:
            continue
        graph.rename({name: f"{name}_of_batch"})
        target = graph.add_constant(f"{name}_sizes", np.array([int(size) for size in sizes[1:]]))
        graph.insert(len(graph.nodes), [make_node("Reshape", [f"{name}_of_batch", target], name)])
        del output.type.tensor_type.shape.dim[0]


def _declare_outputs(graph: ProtoGraph) -> None:
    """Let the outputs have the sizes that follow from those of the inputs; one that varies has a name.

    Twice the sizes are inferred, for two sizes of each axis that is open: what differs is open too, and what cannot be
    inferred depends on the picture.
    """
    graph.forget_sizes()
    inferred = [_infer_outputs(graph, number) for number in (2, 3)]
    for output in graph.outputs:
        sizes = [by_name.get(output.name) for by_name in inferred]
        shape = output.type.tensor_type.shape
        shape.SetInParent()
        if sizes[0] is None or sizes[1] is None or len(sizes[0]) != len(sizes[1]):
            # An operator that is not ONNX's: its file says how many axes.
            sizes = [(None,) * len(shape.dim)] * 2
        shape.ClearField("dim")
        for axis, (size, other) in enumerate(zip(*sizes, strict=True)):  # type: ignore[arg-type]
            dim = shape.dim.add()
            if size is not None and size == other:
                dim.dim_value = size
            else:
                is_batch = (size, other) == (2, 3)
                dim.dim_param = BATCH if is_batch else f"{output.name}_{axis}"


def _infer_outputs(graph: ProtoGraph, number: int) -> Mapping[str, tuple[int | None, ...]]:
    """The sizes of the outputs by name where the batch is `number`, and other open sizes are so many times 64."""

    def refer(tensor: onnx.TensorProto, values: bytes) -> bool:
        if len(values) >= MIN_BYTES:
            refer_to_file(tensor, "weights.bin", 0, len(values))
        return len(values) >= MIN_BYTES

    model = graph.to_proto(refer)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = number if dim.dim_param == BATCH else 64 * number
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return {}
    return {
        output.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None
            for dim in output.type.tensor_type.shape.dim
        )
        for output in inferred.graph.output
        if output.type.tensor_type.HasField("shape")
    }


# The end


def _append_tail(graph: ProtoGraph, cut: Cut) -> None:
    """Put the end that was cut off behind the outputs that feed it; KeyError where it reads or gives others."""
    model = admit_graph(cut.tail, WHERE, GraphKind.TAIL, keep_ends=True).model
    _rename_inner(model.graph, {value.name for value in (*model.graph.input, *model.graph.output)})
    tail = ProtoGraph(model)
    ends = {value.name: value for value in graph.outputs}
    further_inputs = {value.name: value for value in tail.inputs if value.name in cut.given}
    for value in tail.inputs:
        if value.name not in further_inputs and value.name not in ends:
            raise KeyError(value.name)
    if cut.given:
        further_inputs |= {value.name: value for value in graph.inputs}
        graph.inputs = [further_inputs[name] for name in cut.given]
    for name, constant in tail.constants.items():
        graph.add_constant(name, constant)
    graph.insert(len(graph.nodes), tail.nodes)
    graph.opsets.update({domain: version for domain, version in tail.opsets.items() if domain})
    ends |= {value.name: value for value in tail.outputs}
    graph.outputs = [ends[name] for name in cut.order]


def _rename_inner(graph: onnx.GraphProto, ends: Collection[str]) -> None:
    """Let all names of a graph and of its branches begin with TAIL, but for these."""

    def rename(name: str) -> str:
        return name if not name or name in ends else f"{TAIL}{name}"

    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = rename(value.name)
    for node in graph.node:
        node.name = f"{TAIL}{node.name}"
        node.input[:], node.output[:] = map(rename, node.input), map(rename, node.output)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inner(attribute.g, ends)
