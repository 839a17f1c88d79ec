"""Cuts suppression, top-k and what other inputs than the picture decide off the end of a graph: a decoder does them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gemel.models.errors import InputError
from gemel.models.graph.document import describe_node, text_of
from gemel.models.graph.records import Cut
from gemel.models.graph.tail import take_tail
from gemel.models.graph.torch_values import attributes_of

SELECTING = ("TopK", "ArgMax", "ArgMin", "NonZero")
BEARING = ("Conv", "ConvTranspose", "Gemm")
BEFORE_SELECTION = (
    "ReduceMax",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Identity",
    "Greater",
    "GreaterOrEqual",
    "Gather",
)
NMS_INPUTS = ("boxes", "scores", "max_output_boxes_per_class", "iou_threshold", "score_threshold")


def cut_end(graph: ir.Graph, where: str) -> Cut | None:
    """Cut what follows the first suppression or selection that no weights follow; None where there is none.

    So is what follows another input than the picture, such as the frame's size. The outputs are then those that were
    not cut, followed by what the cut part read. Raises InputError for a suppression that weights follow, as two-stage
    detectors have.
    """
    nodes = list(graph)
    further_inputs = other_inputs(graph)
    bearing = _followed_by_weights(nodes)
    starts = []
    for node in nodes:
        if is_suppression(node):
            if node in bearing:
                raise InputError(
                    where,
                    f"{describe_node(node)} has layers with weights after it: a two-stage detector",
                    "name a two-stage detector of torchvision instead, e.g. model: fasterrcnn_resnet50_fpn",
                )
            starts.append(node)
        elif node in bearing:
            # Selections within a network, such as of proposals, are part of it.
            continue
        elif node.op_type in SELECTING or (
            further_inputs.intersection(node.inputs) and not _has_weights(node)
        ):
            starts.append(node)
    pictured = _depend_on_input(nodes, graph)
    starts = [node for node in starts if any(value in pictured for value in node.inputs)]
    if not starts:
        return None
    # A suppression says most of what is cut off, then a selection.
    start = min(starts, key=lambda node: (not is_suppression(node), node.op_type not in SELECTING))
    # All that depends on a start goes with it.
    region = set(starts)
    for node in nodes:
        if any(value is not None and value.producer() in region for value in node.inputs):
            region.add(node)
    feeds: list[ir.Value] = []
    # Scores are fed as they were before a selection flattened them: a decoder needs them by class.
    sources = {
        _before_selection(value, pictured)[-1]
        for node in region
        if node.op_type in SELECTING
        for value in node.inputs[:1]
        if value in pictured and value.producer() not in region
    }
    for node in [start, *(member for member in nodes if member in region and member is not start)]:
        for value in node.inputs:
            if value is None or value not in pictured or value.producer() in region:
                continue
            source = next(
                (earlier for earlier in _before_selection(value, pictured) if earlier in sources),
                value,
            )
            if source not in feeds and source not in graph.inputs:
                feeds.append(source)
    # Outputs that the end does not touch stay the first ones.
    remaining = [value for value in graph.outputs if value.producer() not in region]
    lost = [value for value in graph.outputs if value.producer() in region]
    inputs, outputs, order = (
        tuple(map(text_of, values)) for values in (feeds, lost, graph.outputs)
    )
    tail = take_tail(
        graph, [*feeds, *(value for value in graph.inputs if value in further_inputs)], lost
    )
    inputs_of_file = (
        tuple(text_of(value) for value in graph.inputs if not value.is_initializer())
        if further_inputs
        else ()
    )
    order, inputs_of_file = (order, inputs_of_file) if tail else ((), ())
    cut = Cut(
        start.op_type,
        text_of(start),
        inputs,
        outputs,
        _settings(start),
        order,
        tail,
        inputs_of_file,
    )
    graph.outputs[:] = [*remaining, *(value for value in feeds if value not in remaining)]
    graph.remove([node for node in nodes if node in region], safe=False)
    for value in further_inputs:
        # Inputs that only the end read are no inputs of the network.
        if region.issuperset(value.consumers()):
            graph.inputs.remove(value)
    return cut


def other_inputs(graph: ir.Graph) -> set[ir.Value]:
    """The inputs beside the only one of four axes; none where several are pictures."""
    inputs = [value for value in graph.inputs if not value.is_initializer() and list(value.uses())]
    pictures = [value for value in inputs if value.shape is not None and len(value.shape) == 4]
    return {value for value in inputs if value not in pictures} if len(pictures) == 1 else set()


def is_suppression(node: ir.Node) -> bool:
    """Whether a node is non-maximum suppression, ONNX's or another domain's."""
    return node.op_type == "NonMaxSuppression" or (
        node.domain not in ("", "ai.onnx")
        and "nms" in node.op_type.lower().replace("nonmaxsuppression", "nms")
    )


def remove_unused(graph: ir.Graph) -> None:
    """Remove the nodes that no output needs."""
    needed = {value.producer() for value in graph.outputs}
    nodes = list(graph)
    for node in reversed(nodes):
        if node in needed:
            needed.update(value.producer() for value in node.inputs if value is not None)
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    for inner in attribute.value.all_nodes():
                        needed.update(
                            value.producer() for value in inner.inputs if value is not None
                        )
                    needed.update(value.producer() for value in attribute.value.outputs)
    graph.remove([node for node in nodes if node not in needed], safe=False)


def _followed_by_weights(nodes: list[ir.Node]) -> set[ir.Node]:
    bearing: set[ir.Node] = set()
    for node in reversed(nodes):
        for user in (user for output in node.outputs for user in output.consumers()):
            # Weights may follow a node at any distance.
            if _has_weights(user) or user in bearing:
                bearing.add(node)
    return bearing


def _has_weights(node: ir.Node) -> bool:
    return node.op_type in BEARING or (
        node.op_type == "MatMul"
        and any(value is not None and value.is_initializer() for value in node.inputs)
    )


def _depend_on_input(nodes: list[ir.Node], graph: ir.Graph) -> set[ir.Value]:
    """Values that the picture decides; its shape does not count."""
    dependent: set[ir.Value] = {value for value in graph.inputs if not value.is_initializer()}
    for node in nodes:
        if node.op_type not in ("Shape", "Size") and any(
            value in dependent for value in node.inputs
        ):
            dependent.update(node.outputs)
    return dependent


def _before_selection(value: ir.Value, pictured: set[ir.Value]) -> list[ir.Value]:
    """A selection's input, and what it was before it was compared, reduced, flattened or taken by class."""
    path = [value]
    while (
        (node := value.producer()) is not None
        and node.op_type in BEFORE_SELECTION
        and node.inputs[0] in pictured
    ):
        if any(operand in pictured for operand in node.inputs[1:]):
            break
        value = node.inputs[0]  # type: ignore[assignment]
        path.append(value)
    return path


def _settings(node: ir.Node) -> dict[str, Any]:
    """The attributes and constant inputs of the operator that was cut off."""
    settings = {
        name: value
        for name, value in attributes_of(node).items()
        if isinstance(value, int | float | str | list)
    }
    names = (
        NMS_INPUTS
        if node.op_type == "NonMaxSuppression"
        else ("x", "k")
        if node.op_type == "TopK"
        else ()
    )
    for name, value in zip(names, node.inputs):
        constant = ir.convenience.get_const_tensor(value) if value is not None else None
        if constant is not None and constant.size == 1:
            settings[name] = constant.numpy().reshape(-1)[0].item()
    return settings
