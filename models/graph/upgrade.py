"""Brings graphs of opsets 7 to 10, as torch wrote them until 1.5, to opset 11: attributes there that are inputs now."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

OPSET = 11
BECAME_INPUTS: dict[str, dict[str, type]] = {
    "Clip": {"min": np.float32, "max": np.float32},
    "Pad": {"pads": np.int64, "value": np.float32},
    "Slice": {"starts": np.int64, "ends": np.int64, "axes": np.int64},
    "TopK": {"k": np.int64},
    "Upsample": {"scales": np.float32},
}
"""Attributes of older operators, in the order of the inputs that follow the first."""
RENAMED = {"Upsample": "Resize", "Scatter": "ScatterElements"}


def upgrade_opset(graph: ir.Graph) -> None:
    """Rewrite the nodes of an older opset in place, those of branches too."""
    for node in list(graph.all_nodes()):
        if node.domain not in ("", "ai.onnx"):
            continue
        names = BECAME_INPUTS.get(node.op_type, {})
        if any(name in node.attributes for name in names):
            node.resize_inputs(1)
            for name, dtype in names.items():
                attribute = node.attributes.pop(name, None)
                made = None if attribute is None else _constant(node, name, np.array(attribute.value, dtype))
                node.resize_inputs(len(node.inputs) + 1)
                node.replace_input_with(len(node.inputs) - 1, made)
        if node.op_type in ("Upsample", "Resize") and len(node.inputs) == 2:
            _add_region(node)
        node.op_type = RENAMED.get(node.op_type, node.op_type)
    for domain in ("", "ai.onnx"):
        if domain in graph.opset_imports:
            graph.opset_imports[domain] = OPSET


def _constant(node: ir.Node, name: str, values: np.ndarray) -> ir.Value:
    """A constant before a node; `k` of a top-k is a list of one."""
    values = values.reshape(1) if name == "k" else values
    made = ir.node("Constant", [], {"value": ir.tensor(values)}, name=f"{node.name}.{name}")
    made.outputs[0].name = f"{node.outputs[0].name}.{name}"
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return made.outputs[0]


def _add_region(node: ir.Node) -> None:
    """Put the scales of a resize where they are since opset 11; it took the pixel before each place."""
    scales = node.inputs[1]
    node.resize_inputs(3)
    node.replace_input_with(1, _constant(node, "roi", np.zeros(0, np.float32)))
    node.replace_input_with(2, scales)
    for name, value in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", "floor")):
        node.attributes[name] = ir.AttrString(name, value)
