"""Brings graphs of opsets 7 to 10, as torch wrote them until 1.5, to opset 11, and those of 11 and 12 to 13.

Both times attributes became inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gemel.models.graph.gate import STANDARD_NAMES

OPSET = 11
BECAME_INPUTS: dict[str, dict[str, type]] = {
    "Clip": {"min": np.float32, "max": np.float32},
    "Pad": {"pads": np.int64, "value": np.float32},
    "Slice": {"starts": np.int64, "ends": np.int64, "axes": np.int64},
    "TopK": {"k": np.int64},
    "Upsample": {"scales": np.float32},
}
"""Attributes of older operators, in the order of the inputs that follow the first."""
AXIS_OPSET = 13
"""From which DequantizeLinear takes a scale for each channel."""
BECAME_INPUTS_IN_13: dict[str, dict[str, type]] = {
    "Squeeze": {"axes": np.int64},
    "Unsqueeze": {"axes": np.int64},
    "ReduceSum": {"axes": np.int64},
    "Split": {"split": np.int64},
}
FLATTENING = ("Softmax", "LogSoftmax", "Hardmax")
"""Operators that put all axes from theirs on together until opset 13."""
RENAMED = {"Upsample": "Resize", "Scatter": "ScatterElements"}


def upgrade_opset(model: onnx.ModelProto) -> None:
    """Rewrite the nodes of a model of an older opset in place, those of branches too."""
    if _has_opset(model, OPSET):
        return
    for graph in _graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.domain in STANDARD_NAMES:
                nodes += _move_to_inputs(node, BECAME_INPUTS.get(node.op_type, {}))
                if node.op_type in ("Upsample", "Resize") and len(node.input) == 2:
                    nodes.append(_add_region(node))
                node.op_type = RENAMED.get(node.op_type, node.op_type)
            nodes.append(node)
        _replace_nodes(graph, nodes)
    _set_opset(model, OPSET)


def upgrade_to_axes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """A model of opset 11 or 12 as one of 13; itself, and False, where that changes its meaning."""
    if _has_opset(model, AXIS_OPSET):
        return model, True
    for graph in _graphs(model.graph):
        for node in graph.node:
            # Since 13 they mix one axis alone; before, all from theirs on.
            if node.op_type in FLATTENING and _axis_of(node) != -1:
                return model, False
    upgraded = onnx.ModelProto()
    upgraded.CopyFrom(model)
    for graph in _graphs(upgraded.graph):
        nodes = []
        for node in graph.node:
            if node.domain in STANDARD_NAMES:
                nodes += _move_to_inputs(node, BECAME_INPUTS_IN_13.get(node.op_type, {}))
            nodes.append(node)
        _replace_nodes(graph, nodes)
    _set_opset(upgraded, AXIS_OPSET)
    return upgraded, True


def _has_opset(model: onnx.ModelProto, opset: int) -> bool:
    return all(
        entry.version >= opset for entry in model.opset_import if entry.domain in STANDARD_NAMES
    )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those of its branches."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
    yield graph


def _replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Let a graph have these nodes, some of which are its own."""
    if len(nodes) == len(graph.node):
        return
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _axis_of(node: onnx.NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)


def _move_to_inputs(node: onnx.NodeProto, names: dict[str, type]) -> list[onnx.NodeProto]:
    """Make attributes of a node inputs; returns the constants that these are."""
    values = {attribute.name: attribute for attribute in node.attribute if attribute.name in names}
    if not values:
        return []
    inputs = [node.input[0]]
    constants = []
    for name, dtype in names.items():
        if name not in values:
            inputs.append("")
            continue
        constants.append(
            _constant(node, name, np.array(helper.get_attribute_value(values[name]), dtype))
        )
        inputs.append(constants[-1].output[0])
    remaining = [attribute for attribute in node.attribute if attribute.name not in names]
    del node.attribute[:], node.input[:]
    node.attribute.extend(remaining)
    node.input.extend(inputs)
    return constants


def _set_opset(model: onnx.ModelProto, opset: int) -> None:
    for entry in model.opset_import:
        if entry.domain in STANDARD_NAMES:
            entry.version = opset


def _constant(node: onnx.NodeProto, name: str, values: np.ndarray) -> onnx.NodeProto:
    """A constant before a node; `k` of a top-k is a list of one."""
    values = values.reshape(1) if name == "k" else values
    tensor = numpy_helper.from_array(values)
    return helper.make_node(
        "Constant", [], [f"{node.output[0]}.{name}"], f"{node.name}.{name}", value=tensor
    )


def _add_region(node: onnx.NodeProto) -> onnx.NodeProto:
    """Put the scales of a resize where they are since opset 11; it took the pixel before each place."""
    region = _constant(node, "roi", np.zeros(0, np.float32))
    scales = node.input[1]
    node.input[1] = region.output[0]
    node.input.append(scales)
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    remaining = [attribute for attribute in node.attribute if attribute.name not in modes]
    del node.attribute[:]
    node.attribute.extend(
        [*remaining, *(helper.make_attribute(name, value) for name, value in modes.items())]
    )
    return region
