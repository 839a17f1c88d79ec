"""Every attribute and optional output of every operator that is read: ONNX Runtime's answer, or one line why not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gemel.models.errors import InputError
from gemel.models.graph import Graph, build_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.graph.operators import OPERATORS
from tests.models.graph.test_operators import CASES, OPSETS, OUTPUTS, Draw

SIDE = 8
WORDS = {
    "auto_pad": ["SAME_UPPER", "SAME_LOWER", "VALID"],
    "mode": [
        "nearest",
        "linear",
        "cubic",
        "bilinear",
        "bicubic",
        "max",
        "avg",
        "wrap",
        "edge",
        "reflect",
        "DCR",
        "CRD",
    ],
    "coordinate_transformation_mode": ["tf_crop_and_resize", "half_pixel_symmetric", "output_half_pixel", "half_pixel"],
    "nearest_mode": ["ceil", "round_prefer_ceil"],
    "keep_aspect_ratio_policy": ["not_larger", "not_smaller"],
    "padding_mode": ["reflection", "border"],
    "direction": ["reverse", "bidirectional"],
    "reduction": ["mul", "min", "max", "add"],
    "approximate": ["tanh"],
    "equation": ["bij, bjk -> ik"],
    "round_mode": ["down"],
}
"""Values of attributes that are texts."""
VALUES: dict[Any, list[Any]] = {
    onnx.defs.OpSchema.AttrType.INT: [0, 1, 2, -1],
    onnx.defs.OpSchema.AttrType.FLOAT: [0.5, 2.0],
    onnx.defs.OpSchema.AttrType.INTS: [[1, 1], [2, 2], [1, 1, 1, 1], [1, 2, 3]],
    onnx.defs.OpSchema.AttrType.FLOATS: [[0.5]],
}
COUNTS = {
    "group", "blocksize", "num_groups", "size", "q_num_heads", "kv_num_heads", "num_outputs", "hidden_size", "p",
    "output_height", "output_width", "block_size",
}  # fmt: skip
"""Attributes that divide: ONNX Runtime ends with the process where they are 0."""
FIXED = {"to", "saturate", "seed", "consumed_inputs"}
"""Attributes of types and of chance."""


class FirstDraw(Draw):
    """The first example of each operator."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.data = self

    def int(self, low: int, high: int) -> int:
        return low

    def one_of(self, *values: Any) -> Any:
        return values[0]

    def draw(self, strategy: Any) -> Any:
        return list(range(4))


def changes_of(name: str, opset: int) -> Iterator[dict[str, Any]]:
    """Each value of each attribute of an operator alone."""
    schema = onnx.defs.get_schema(name, opset)
    for key, attribute in schema.attributes.items():
        if key not in FIXED:
            values = WORDS.get(key, []) if attribute.type == onnx.defs.OpSchema.AttrType.STRING else None
            values = VALUES.get(attribute.type, []) if values is None else values
            yield from ({key: value} for value in values if key not in COUNTS or value not in (0, -1))


def write(path: Path, name: str, opset: int, change: dict[str, Any], outputs: list[str], ends: list[str]) -> bool:
    """A file in which one operator reads floats that follow the picture; whether there are such."""
    inputs, attributes = CASES[name](FirstDraw())
    arrays = [None if one is None else np.asarray(one) for one in inputs]
    place = next((place for place, one in enumerate(arrays) if one is not None and one.dtype == np.float32), None)
    if place is None:
        return False
    names = ["" if one is None else f"x{index}" for index, one in enumerate(arrays)]
    weights = [numpy_helper.from_array(one, f"x{index}") for index, one in enumerate(arrays) if one is not None]
    names[place] = "given"
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Slice", ["mean", "one", "two", "one"], ["channel"]),
        helper.make_node("Reshape", ["channel", "none"], ["number"]),
        helper.make_node("Mul", [f"x{place}", "number"], ["given"]),
        helper.make_node(name, names, outputs, **{**attributes, **change}),
    ]
    weights += [numpy_helper.from_array(np.array(values, np.int64), key)
                for key, values in (("one", [1]), ("two", [2]), ("none", []))]  # fmt: skip
    picture = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
    made = [onnx.ValueInfoProto(name=one) for one in ends]
    graph = helper.make_graph(nodes, "one", [picture], made, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return True


def answer_of(path: Path, frame: np.ndarray) -> list[np.ndarray] | None:
    """What ONNX Runtime answers; None where it does not take the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return [np.asarray(one) for one in session.run(None, {"x": frame})]
    except Exception:  # onnxruntime has a class of its own for each fault
        return None


def read(path: Path) -> Graph | str:
    """The graph, or the line that refuses it."""
    try:
        return read_graph(path)
    except InputError as error:
        return str(error)


def compare(path: Path, name: str, what: str) -> str:
    """What is wrong with the answer to a file; empty where it is ONNX Runtime's, or refused by its operator's name."""
    frame = np.random.default_rng(1).random((1, 3, SIDE, SIDE), np.float32) + 0.5
    graph = read(path)
    if isinstance(graph, str):  # ONNX Runtime, which some values end, is not asked
        is_said = name in graph and "malformed" not in graph and "\n" not in graph
        return "" if is_said else f"{what}: {graph}"
    expected = None if graph.cut else answer_of(path, frame)
    if expected is None:  # what was cut off its end is written again, and not computed
        return ""
    try:
        network = build_graph(graph.document)
        network.load_state_dict(graph.state)
        with torch.no_grad():
            outputs = network(torch.from_numpy(frame))
    except Exception as error:  # whatever it is, it came after the file was taken
        return f"{what}: {type(error).__name__}: {str(error)[:120]}"
    for output, wanted in zip(outputs, expected, strict=True):
        given = output.numpy().reshape(-1)
        if given.size != wanted.size or not np.allclose(given, wanted.reshape(-1), 1e-4, 1e-4, equal_nan=True):
            return f"{what}: {output.shape} and {wanted.shape}, or other values"
    return ""


@pytest.mark.parametrize("name", sorted(set(OPERATORS) & set(CASES)))
def test_operator_of_any_attribute_answers_or_is_refused(name: str, tmp_path: Path) -> None:
    path, faults = tmp_path / "m.onnx", []
    opset = OPSETS.get(name, (18,))[-1]
    outputs = [f"y{place}" for place in range(OUTPUTS.get(name, 1))]
    for change in [{}, *changes_of(name, opset)]:
        if write(path, name, opset, change, outputs, outputs):
            faults.append(compare(path, name, f"{name} {change}"))
    schema = onnx.defs.get_schema(name, opset)
    more = [f"y{place}" for place in range(min(schema.max_output, 4))]
    modes = ({"training_mode": mode} for mode in (0, 1)) if "training_mode" in schema.attributes else ({},)
    for change, ends in itertools.product(modes, (more[:1], more)):
        if len(more) > len(outputs) and name != "Dropout" and write(path, name, opset, change, more, ends):
            fault = compare(path, name, f"{name} {change} {ends}")
            faults += [fault] if not change.get("training_mode") or "Error" in fault else []
    assert not any(faults), "\n".join(filter(None, faults))
