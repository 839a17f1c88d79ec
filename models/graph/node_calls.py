"""One node of a graph as a call of an operator's function, and the nodes that no function computes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from gemel.models.errors import InputError
from gemel.models.graph.document import describe_node, text_of
from gemel.models.graph.document_bounds import HINT
from gemel.models.graph.operators import OPERATORS
from gemel.models.graph.operators.shapes import dtype_of
from gemel.models.graph.torch_values import attributes_of, to_torch

CONTROL_FLOW = ("Loop", "Scan", "SequenceMap", "If")
QUANTISED = (
    "QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
)  # fmt: skip


def apply(node: ir.Node, inputs: list[Any], opset: int) -> tuple[Tensor, ...]:
    """Compute a node from tensors."""
    operator = OPERATORS[node.op_type]
    arguments, attributes = prepare_call(node, inputs, opset)
    result = operator.run(*arguments, **attributes)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def prepare_call(node: ir.Node, inputs: list[Any], opset: int) -> tuple[list[Any], dict[str, Any]]:
    """What an operator's function is called with: known static inputs as numbers, attributes by name."""
    operator = OPERATORS[node.op_type]
    arguments = [
        value.tolist() if place in operator.static and isinstance(value, Tensor) else value
        for place, value in enumerate(inputs)
    ]
    attributes = attributes_of(node)
    attributes.pop("consumed_inputs", None)  # of ONNX's first versions, about memory
    if node.op_type == "ConstantOfShape" and isinstance(attributes.get("value"), Tensor):
        value = attributes["value"]
        attributes = {"value": value.reshape(-1)[0].item(), "dtype": value.dtype}
    if operator.opset:
        attributes["opset"] = opset
    if operator.count:
        attributes["count"] = len(node.outputs)
    return arguments, attributes


def check_operator(node: ir.Node, where: str) -> None:
    """Refuse operators that cannot be computed."""
    if node.op_type in OPERATORS and node.domain in ("", "ai.onnx"):
        return
    description = describe_node(node)
    problem = f"{description} is no operator that can be computed"
    hint = "export the model without it"
    if node.op_type in CONTROL_FLOW or node.op_type.startswith("Sequence"):
        problem = f"{description} decides by what the picture shows"
        hint = "export the model without loops and branches"
    elif node.op_type in QUANTISED or node.op_type.startswith("QLinear"):
        problem = f"{description}: the file is quantised to integers"
        hint = "give it with QuantizeLinear and DequantizeLinear (QDQ)"
    elif node.domain not in ("", "ai.onnx"):
        problem = f"{description} is of the custom domain '{node.domain}'"
        # ONNX Runtime writes its own fused operators into a file that it has optimised.
        if node.domain.startswith("com.microsoft"):
            hint = "give the file as it was exported, before ONNX Runtime optimised it"
    raise InputError(where, problem, hint)


def to_torch_type(dtype: ir.DataType | None) -> torch.dtype:
    """A value's type in torch; half precision is float32."""
    return torch.float32 if dtype is None else dtype_of(int(dtype))


def read_initializer(value: ir.Value, where: str) -> Tensor:
    """A constant of a branch, which is in the file itself."""
    if value.const_value is None or isinstance(value.const_value, ir.ExternalTensor):
        problem = f"the constant '{text_of(value)}' of a branch is not in the file"
        raise InputError(where, problem, HINT)
    return to_torch(value.const_value.numpy())


def constant_value(node: ir.Node) -> Tensor:
    """The tensor that a Constant holds."""
    name, attribute = next(iter(node.attributes.items()))
    value = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return torch.from_numpy(value.numpy())  # in memory of its own, which may be written to
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
