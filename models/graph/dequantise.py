"""Takes a file that is quantised to int8 (QDQ) for the float network that its codes stand for."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

CODING = ("QuantizeLinear", "DequantizeLinear")
CLIPPED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sum", "Mul", "BatchNormalization")
"""Operators after which a quantiser leaves out ReLU and ReLU6: codes from 0 on clip as these do."""


def drop_codes(model: onnx.ModelProto) -> int:
    """Let what reads a value that was rounded to codes read the value itself, in place; returns how many are read so.

    That is so where a DequantizeLinear follows a QuantizeLinear of the same scale and zero. Codes of weights stay.
    """
    graph = model.graph
    constants = _scalars_of(graph)
    producers = {name: node for node in graph.node for name in node.output}
    values: dict[str, str] = {}
    count = 0
    for node in graph.node:
        source = (
            producers.get(node.input[0])
            if node.op_type == "DequantizeLinear" and node.input
            else None
        )
        if source is None or source.op_type != "QuantizeLinear" or len(node.input) < 2:
            continue
        written, taken = (
            [constants.get(name) for name in coder.input[1:]] for coder in (source, node)
        )
        # Read with another scale, the codes mean other values.
        if written != taken or None in written:
            continue
        count += 1
        value = values.get(source.input[0], source.input[0])
        maker = producers.get(value)
        limits = _limits_of(written)
        node.input[:] = [value]
        del node.attribute[:]
        # Codes from 0 on cut off what is below: the quantiser has dropped a ReLU there.
        if limits[0] == 0 and maker is not None and maker.op_type in CLIPPED:
            node.op_type = "Clip"
            for side, limit in zip(("low", "high"), limits, strict=True):
                name = f"{node.output[0]}.{side}"
                graph.initializer.append(numpy_helper.from_array(np.array(limit, np.float32), name))
                node.input.append(name)
        else:
            node.op_type = "Identity"  # an output of the file keeps its name
            values[node.output[0]] = value
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = values.get(name, name)
    return count


def _limits_of(constants: list[np.ndarray | None]) -> tuple[float, float]:
    """The least and largest value that codes of this scale and zero stand for."""
    scale, zero = (*constants, np.uint8(0))[:2]
    assert scale is not None and zero is not None
    codes = np.iinfo(zero.dtype)
    return (codes.min - int(zero)) * float(scale), (codes.max - int(zero)) * float(scale)


def _scalars_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The constants of one value, by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and node.output
            and node.attribute
            and node.attribute[0].HasField("t")
        ):
            tensors[node.output[0]] = node.attribute[0].t
    names = {name for node in graph.node if node.op_type in CODING for name in node.input[1:]}
    single = {
        name: tensors[name]
        for name in names
        if name in tensors and list(tensors[name].dims) in ([], [1])
    }
    return {
        name: numpy_helper.to_array(tensor).reshape(())
        for name, tensor in single.items()
        if tensor.data_location != onnx.TensorProto.EXTERNAL
    }
