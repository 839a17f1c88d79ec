"""Separates the scale of each convolution's rows from their direction: what an exporter folded becomes private again.

A file that was exported has no norms: their scales are in the weights W, their offsets in the biases b. With
W[o] = s[o] V[o] and |V[o]| = 1, two networks that differ in their norms alone have one V, and a merge shares V while s
and b stay each network's own.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import torch
from torch import Tensor, nn

from gemel.models.graph.document import is_weight, parse_model, write_document
from gemel.models.graph.gate import WEIGHTS, WHERE
from gemel.models.graph.records import ONES, SUFFIX, ZEROS, Graph


class ChannelAffine(nn.Module):
    """x (N, C, ...) times `weight` plus `bias`, each f32 (C,): a norm in eval mode, with nothing to recalibrate."""

    def __init__(self, channels: int, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, device=device))
        self.bias = nn.Parameter(torch.zeros(channels, device=device))

    def forward(self, x: Tensor) -> Tensor:
        shape = -1, *(1,) * (x.ndim - 2)
        return torch.addcmul(self.bias.view(shape), x, self.weight.view(shape))

    def extra_repr(self) -> str:
        return str(len(self.weight))


def unfold_norms(graph: Graph) -> Graph:
    """The graph with an affine of its own after each convolution that has a bias and no norm; it answers the same."""
    model = parse_model(graph.document, WHERE, keep_ends=True)
    state = dict(graph.state)
    foldable: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type == "Conv" and (path := _foldable(node, state)) is not None:
            foldable.setdefault(path, []).append(node)
    for path, nodes in foldable.items():
        # Every reader of the weight must be one of these, or its scale would change for others.
        if len(nodes) == len({user for user, _ in nodes[0].inputs[1].uses()}):  # type: ignore[union-attr]
            _unfold(model.graph, path, nodes, state)
    keys = [value.name for value in model.graph.initializers.values() if is_weight(value)]
    ordered = {str(key): state.pop(str(key)) for key in keys}
    return replace(graph, document=write_document(model), state=ordered | state)


def is_affine(node: ir.Node) -> bool:
    """Whether a node of a document is a ChannelAffine."""
    return node.op_type == "BatchNormalization" and all(
        value is not None and not is_weight(value) and str(value.name).startswith(prefix)
        for value, prefix in zip(node.inputs[3:], (ZEROS, ONES), strict=True)
    )


def _foldable(node: ir.Node, state: dict[str, Tensor]) -> str | None:
    """The path of a convolution that may have had a norm."""
    names = [value.name if value is not None else None for value in node.inputs]
    path = str(names[1]).removesuffix(".weight")
    weight = state.get(f"{path}.weight")
    auto_pad = node.attributes.get("auto_pad")
    if names[1:] != [f"{path}.weight", f"{path}.bias"] or weight is None or weight.ndim != 4:
        return None
    # Padding by the picture's size is no torch module's.
    if auto_pad is not None and auto_pad.as_string().startswith("SAME"):
        return None
    norms = any(user.op_type == "BatchNormalization" for user in node.outputs[0].consumers())
    is_known = f"{path}{SUFFIX}.weight" in state or f"{path}.bias" not in state
    return None if norms or is_known else path


def _unfold(graph: ir.Graph, path: str, nodes: list[ir.Node], state: dict[str, Tensor]) -> None:
    weight = state[f"{path}.weight"]
    bias = state.pop(f"{path}.bias")
    scale = weight.flatten(1).norm(dim=1)
    scale[scale == 0] = 1
    shape = (len(scale), 1, 1, 1)
    state[f"{path}.weight"] = weight / scale.view(shape)
    state[f"{path}{SUFFIX}.weight"], state[f"{path}{SUFFIX}.bias"] = scale, bias
    old = nodes[0].inputs[2]
    inputs = [_weight(graph, f"{path}{SUFFIX}.{name}", len(scale)) for name in ("weight", "bias")]
    inputs += [
        _constant(graph, ZEROS, torch.zeros_like(scale)),
        _constant(graph, ONES, torch.ones_like(scale)),
    ]
    for node in nodes:
        node.resize_inputs(2)
        output = node.outputs[0]
        affine = ir.node(
            "BatchNormalization", [output, *inputs], {"epsilon": 0.0}, name=f"{node.name}{SUFFIX}"
        )
        result = affine.outputs[0]
        result.name, output.name = output.name, f"{output.name}{SUFFIX}"
        result.shape = output.shape
        result.type = output.type
        output.shape = output.type = None
        for user, place in list(output.uses()):
            if user is not affine:
                user.replace_input_with(place, result)
        graph.outputs[:] = [result if value is output else value for value in graph.outputs]
        graph.insert_after(node, affine)
    if old is not None and not list(old.uses()):
        del graph.initializers[str(old.name)]


def _weight(graph: ir.Graph, name: str, length: int) -> ir.Value:
    shape = ir.Shape([length])
    dtype = ir.DataType.FLOAT
    tensor = ir.ExternalTensor(WEIGHTS, 0, 4 * length, dtype, shape=shape, name=name)
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _constant(graph: ir.Graph, prefix: str, values: Tensor) -> ir.Value:
    name = f"{prefix}{len(values)}"
    if name not in graph.initializers:
        tensor = ir.tensor(values.numpy(), name=name)
        value = ir.Value(
            name=name, shape=ir.Shape([len(values)]), type=ir.TensorType(ir.DataType.FLOAT)
        )
        value.const_value = tensor
        graph.register_initializer(value)
    return graph.initializers[name]
