"""Small ONNX files, as exporters write them: norms folded into convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

SIDE, CLASSES = 16, 3
METADATA = {"names": "{0: 'car', 1: 'bus', 2: 'truck'}", "task": "classify", "stride": "4"}


def write_classifier(path: Path, seed: int = 0, scales: float = 0.0, norm: bool = False) -> Path:
    """A classifier with three convolutions, one of which is called twice, and a linear layer.

    `scales` changes each row of the weights by up to that fraction, as another norm does; `norm` adds a
    BatchNormalization after the first convolution.
    """
    rng, rows = np.random.default_rng(0), np.random.default_rng(seed)
    weights = {
        "stem.weight": rng.standard_normal((8, 3, 3, 3)), "stem.bias": rng.standard_normal(8),
        "body.weight": rng.standard_normal((8, 8, 3, 3)), "body.bias": rng.standard_normal(8),
        "deep.weight": rng.standard_normal((8, 1, 3, 3)), "deep.bias": rng.standard_normal(8),
        "fc.weight": rng.standard_normal((CLASSES, 8)), "fc.bias": rng.standard_normal(CLASSES),
    }  # fmt: skip
    for name, weight in weights.items():
        if weight.ndim == 4:
            weight *= 1 + scales * rows.uniform(-1, 1, (len(weight), 1, 1, 1)) if scales else 1
            weight[0] *= name != "deep.weight"  # a dead channel
    weights |= {f"norm.{key}": rng.uniform(0.5, 1, 8) for key in ("weight", "bias", "mean", "var")} if norm else {}
    after = "n" if norm else "a"
    nodes = [
        _node("Conv", ["frames", "stem.weight", "stem.bias"], "a", pads=[1] * 4, strides=[2, 2]),
        *([_node("BatchNormalization", ["a", *(f"norm.{k}" for k in ("weight", "bias", "mean", "var"))], "n")] * norm),
        _node("Relu", [after], "b"),
        _node("Conv", ["b", "body.weight", "body.bias"], "c", pads=[1] * 4),
        _node("Relu", ["c"], "d"),
        _node("Conv", ["d", "body.weight", "body.bias"], "e", pads=[1] * 4),
        _node("Conv", ["e", "deep.weight", "deep.bias"], "f", pads=[1] * 4, group=8),
        _node("GlobalAveragePool", ["f"], "g"), _node("Flatten", ["g"], "h"),
        _node("Gemm", ["h", "fc.weight", "fc.bias"], "scores", transB=1),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info("frames", onnx.TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])]
    outputs = [helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["batch", CLASSES])]
    tensors = [numpy_helper.from_array(weight.astype(np.float32), name) for name, weight in weights.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "net", inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    helper.set_model_props(model, METADATA)
    onnx.save(model, path)
    return path


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"make_{output}", **attributes)
