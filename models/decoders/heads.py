"""What the outputs of an ONNX graph look like: shapes, and the operators by which they are made. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gemel.models.decoders.decoder import GraphHead, Output

if TYPE_CHECKING:
    import onnx

    from gemel.models.graph import Graph

BATCH, PER_FRAME = "batch", "*batch"
"""A free size of a graph, and the end of one that grows with it."""
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
MOVING = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators whose outputs are elements of their inputs."""


def head_of(graph: Graph) -> GraphHead:
    """What a graph's outputs look like for one frame."""
    import onnx

    batch, _, height, width = graph.input.shape
    document = onnx.load_from_string(graph.document)
    makers = {name: node for node in document.graph.node for name in node.output}
    outputs = []
    for output in graph.outputs:
        shape = output.shape[1:] if output.shape[:1] == (batch,) else output.shape
        sides = tuple(int(str(side).removesuffix(PER_FRAME).replace(BATCH, "1")) for side in shape)
        axis = next((place for place, side in enumerate(output.shape) if BATCH in str(side)), None)
        form = box_form(makers, output.name) if sides[-1:] == (4,) else (False, False)
        tail, sources = tail_of(makers, output.name)
        outputs.append(
            Output(
                output.name, sides, tail, axis, *form, sources, count_before(makers, output.name)
            )
        )
    is_whole = graph.file_input is not None and graph.file_input.dtype == "uint8"
    return GraphHead(tuple(outputs), (int(height), int(width)), graph.metadata, graph.cut, is_whole)


def tail_of(
    makers: Mapping[str, onnx.NodeProto], output: str
) -> tuple[frozenset[str], frozenset[str]]:
    """The operators between an output and the layers that it comes from, and the outputs of these layers."""
    operators = set()
    layers = set()
    seen = set()
    pending = [output]
    while pending:
        name = pending.pop()
        node = makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in LAYERS:
            layers.add(name)
            continue
        operators.add(node.op_type)
        pending += node.input
    return frozenset(operators), frozenset(layers)


def count_before(makers: Mapping[str, onnx.NodeProto], output: str) -> int:
    """How many values a network computes before an output."""
    seen: set[str] = set()
    pending = [output]
    while pending:
        name = pending.pop()
        if name in makers and name not in seen:
            seen.add(name)
            pending += makers[name].input
    return len(seen)


def box_form(makers: Mapping[str, onnx.NodeProto], name: str) -> tuple[bool, bool]:
    """Whether an output joins differences, then as many sums; and whether it was multiplied by constants last."""
    is_scaled = False
    node = _without_moves(makers, name)
    while node is not None and node.op_type in ("Mul", "Div", "Clip"):
        picture = [name for name in node.input if name in makers]
        if node.op_type != "Clip":
            if len(picture) != 1:
                return False, is_scaled
            is_scaled = node.op_type == "Mul"
        node = _without_moves(makers, picture[0])
    if node is None or node.op_type != "Concat":
        return False, is_scaled
    parts = [_without_moves(makers, part) for part in node.input]
    kinds = [part.op_type if part is not None else "" for part in parts]
    half = len(parts) // 2
    return kinds == ["Sub"] * half + ["Add"] * half and half > 0, is_scaled


def _without_moves(makers: Mapping[str, onnx.NodeProto], name: str) -> onnx.NodeProto | None:
    """What made a value, beyond operators that move the elements of one tensor."""
    node = makers.get(name)
    while node is not None and node.op_type in MOVING - {"Concat"}:
        node = makers.get(node.input[0])
    return node
