"""Files that take pictures of another form than (N, 3, H, W) answer as ONNX Runtime, and are written again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gemel.models.graph import build_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.graph.stored import store_graph

SIDE = 8
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
FORMS = {
    "grey": (TensorProto.FLOAT, ["N", 1, SIDE, SIDE], []),
    "grey, channels last": (TensorProto.FLOAT, ["N", SIDE, SIDE, 1], [("Transpose", {"perm": [0, 3, 1, 2]})]),
    "one picture": (TensorProto.FLOAT, [3, SIDE, SIDE], [("Unsqueeze", "axis")]),
    "one picture of integers, channels last": (
        TensorProto.UINT8,
        [SIDE, SIDE, 3],
        [("Cast", {"to": TensorProto.FLOAT}), ("Transpose", {"perm": [2, 0, 1]}), ("Unsqueeze", "axis")],
    ),
}


def write(path: Path, form: str) -> Path:
    """A convolution behind what brings an input into the usual form."""
    dtype, shape, steps = FORMS[form]
    channels = 1 if "grey" in form else 3
    nodes, name = [], "x"
    for place, (operator, options) in enumerate(steps):
        more = ["axis"] if options == "axis" else []
        given = options if isinstance(options, dict) else {}
        nodes.append(helper.make_node(operator, [name, *more], [f"v{place}"], **given))
        name = f"v{place}"
    nodes += [helper.make_node("Conv", [name, "w"], ["a"]), helper.make_node("GlobalAveragePool", ["a"], ["y"])]
    weight = np.random.default_rng(0).normal(size=(4, channels, 3, 3)).astype(np.float32)
    values = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([0]), "axis")]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", dtype, shape)], [onnx.ValueInfoProto(name="y")], values
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


READS_ITS_WIDTH = [
    helper.make_node("Shape", ["t"], ["sizes"]),
    helper.make_node("Gather", ["sizes", "one"], ["width"]),
    helper.make_node("Concat", ["any", "width", "four"], ["shape"], axis=0),
    helper.make_node("Reshape", ["t", "shape"], ["y"]),
]


@pytest.mark.parametrize(
    ("shape", "end", "inputs", "outputs"),
    [
        (["n", 3, 8, "w"], [], ["batch", 3, 8, "width"], ["batch", "y_1", 4]),
        ([1, 3, 8, 32], [], [1, 3, 8, 32], [1, 30, 4]),
        (["n", 3, 8, "w"], READS_ITS_WIDTH, ["batch", 3, 8, 32], ["batch", 30, 4]),
    ],
)
def test_written_graph_takes_the_sizes_of_its_file(shape, end, inputs, outputs, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("ReduceMean", ["a"], ["m"], axes=[2], keepdims=0),
        helper.make_node("Transpose", ["m"], ["t" if end else "y"], perm=[0, 2, 1]),
        *end,
    ]
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    values = {"w": weight, "one": np.array([1]), "any": np.array([-1]), "four": np.array([4])}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    read = read_graph(tmp_path / "m.onnx", (8, 32))
    written = fill_graph(store_graph(read), lambda key: read.state[key].numpy())
    onnx.save(written.to_proto(), tmp_path / "again.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "again.onnx"))
    assert (session.get_inputs()[0].shape, session.get_outputs()[0].shape) == (inputs, outputs)
    for width in (32, 48) if "width" in inputs else (32,):
        picture = np.random.default_rng(1).normal(size=(1, 3, 8, width)).astype(np.float32)
        given, again = run(tmp_path / "m.onnx", picture), run(tmp_path / "again.onnx", picture)
        np.testing.assert_allclose(again, given, rtol=1e-4, atol=1e-5)


def run(path: Path, picture: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": picture})[0])


@pytest.mark.parametrize("form", FORMS)
def test_read_graph_of_another_input_answers_as_onnx_runtime(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", form)
    graph = read_graph(path)
    network = build_graph(graph.document)
    network.load_state_dict(graph.state)
    frame = np.random.default_rng(1).integers(0, 256, (1, 3, SIDE, SIDE)).astype(np.float32)
    picture = (frame * LUMA[:, None, None]).sum(axis=1, keepdims=True) if "grey" in form else frame
    picture = picture.transpose(0, 2, 3, 1) if "last" in form else picture
    picture = picture[0] if "one" in form else picture
    picture = picture.astype(np.uint8) if "integers" in form else picture.astype(np.float32)
    wanted = run(path, picture)
    np.testing.assert_allclose(network(torch.from_numpy(frame))[0].detach().numpy(), wanted, rtol=1e-4, atol=1e-3)

    written = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy())
    onnx.save(written.to_proto(), tmp_path / "again.onnx")
    np.testing.assert_allclose(run(tmp_path / "again.onnx", picture), wanted, rtol=1e-4, atol=1e-3)
