"""What was cut off a graph is put back where a file is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from gemel.models.errors import InputError
from gemel.models.graph import load_graph
from gemel.models.graph.fill import fill_graph
from gemel.models.graph.stored import store_graph
from gemel.models.graph.unfold import unfold_norms

SIDE, BEST = 32, 5


def save(path: Path, nodes: list, values: dict, outputs: dict, opset: int) -> Path:
    """A graph of a picture x with these constants and shapes of outputs, as a file."""
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", kind, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def write_selecting(path: Path) -> Path:
    """A detector that chooses its best boxes itself; the second output is written first."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4, strides=[4, 4]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Split", ["t", "parts"], ["boxes", "scores"], axis=2),
        helper.make_node("ReduceMax", ["scores"], ["best"], axes=[2], keepdims=0),
        helper.make_node("TopK", ["best", "k"], ["found_scores", "rows"], axis=1),
        helper.make_node("Unsqueeze", ["rows", "last"], ["each"]),
        helper.make_node("Tile", ["each", "four"], ["places"]),
        helper.make_node("GatherElements", ["boxes", "places"], ["found_boxes"], axis=1),
    ]
    values = {
        "w": np.random.default_rng(0).standard_normal((7, 3, 3, 3)).astype(np.float32), "b": np.zeros(7, np.float32),
        "shape": np.array([1, 7, -1]), "parts": np.array([4, 3]), "k": np.array([BEST]), "last": np.array([2]),
        "four": np.array([1, 1, 4]),
    }  # fmt: skip
    return save(path, nodes, values, {"found_boxes": [1, BEST, 4], "found_scores": [1, BEST]}, 17)


def test_a_written_graph_has_the_outputs_of_its_file(tmp_path):
    file = write_selecting(tmp_path / "a.onnx")
    graph = unfold_norms(load_graph(file))
    assert graph.cut is not None and graph.cut.order == ("found_boxes", "found_scores")
    model = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy()).to_proto()
    onnx.checker.check_model(model, full_check=True)
    frames = np.random.default_rng(1).standard_normal((1, 3, SIDE, SIDE)).astype(np.float32)
    sessions = [onnxruntime.InferenceSession(one) for one in (str(file), model.SerializeToString())]
    assert [one.name for one in sessions[1].get_outputs()] == ["found_boxes", "found_scores"]
    for wanted, found in zip(*(session.run(None, {"x": frames}) for session in sessions), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def write_suppressing(path: Path) -> Path:
    """A detector whose end reads its boxes without their batch, as MMDeploy writes one that takes one picture;
    a product with a stack of matrices precedes it."""
    nodes = [
        helper.make_node("MatMul", ["x", "stack"], ["mixed"]),
        helper.make_node("Conv", ["mixed", "w", "b"], ["c"], pads=[1] * 4, strides=[4, 4]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("Sigmoid", ["r"], ["s"]),
        helper.make_node("Split", ["s", "parts"], ["sides", "scores"], axis=1),
        helper.make_node("Transpose", ["sides"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("Squeeze", ["boxes", "first"], ["rows"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "k"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "column"], ["places"], axis=1),
        helper.make_node("Gather", ["rows", "places"], ["found"], axis=0),
        helper.make_node("Squeeze", ["scores", "first"], ["all_scores"]),
    ]
    values = {
        "w": np.random.default_rng(0).standard_normal((7, 3, 3, 3)).astype(np.float32), "b": np.zeros(7, np.float32),
        "shape": np.array([1, 7, -1]), "parts": np.array([4, 3]), "k": np.array([BEST]), "first": np.array([0]),
        "column": np.array(2), "stack": np.random.default_rng(2).random((1, 3, SIDE, SIDE), np.float32) / SIDE,
    }  # fmt: skip
    return save(path, nodes, values, {"found": ["n", 4], "all_scores": [3, (SIDE // 4) ** 2]}, 13)


def test_a_written_graph_of_one_picture_has_no_batch_where_its_file_has_none(tmp_path):
    file = write_suppressing(tmp_path / "a.onnx")
    graph = unfold_norms(load_graph(file))
    assert graph.input.shape[0] == "batch" and set(graph.led) == {"rows", "all_scores"}
    again = fill_graph(store_graph(graph), lambda key: graph.state[key].numpy()).to_proto().SerializeToString()
    frames = np.random.default_rng(1).standard_normal((1, 3, SIDE, SIDE)).astype(np.float32)
    answers = [onnxruntime.InferenceSession(one).run(None, {"x": frames}) for one in (str(file), again)]
    for wanted, found in zip(*answers, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("change", [{"tail": b"\xff"}, {"order": ("absent",)}])
def test_an_end_that_does_not_fit_is_refused(tmp_path, change):
    graph = load_graph(write_selecting(tmp_path / "a.onnx"))
    assert graph.cut is not None
    lie = replace(graph, cut=replace(graph.cut, **change))
    with pytest.raises(InputError):
        fill_graph(store_graph(lie), lambda key: graph.state[key].numpy())
