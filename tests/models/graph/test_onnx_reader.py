"""Graphs read from ONNX files: the same answers as ONNX Runtime, at any batch, with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gemel.models.errors import InputError
from gemel.models.graph import build_graph, load_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.notes import collect_notes


def run_both(path: Path, batch: int = 1, scale: float = 1.0):
    """The module's and ONNX Runtime's outputs for pictures that are drawn, of values up to `scale`."""
    graph = load_graph(path)
    module = build_graph(graph.document)
    module.load_state_dict(graph.state, strict=True)
    frames = torch.rand(batch, *(int(side) for side in graph.input.shape[1:])) * scale
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in graph.outputs]
    expected = [session.run(names, {graph.input.name: frame[None].numpy()}) for frame in frames]
    with torch.no_grad():
        outputs = module(frames)
    return (
        module,
        outputs,
        [np.stack([np.asarray(one[place]).squeeze() for one in expected]) for place in range(len(names))],
    )


@pytest.mark.parametrize(("name", "scale"), [("yolox_nano_416", 255), ("nanodet_m_320", 1), ("FastestDet", 1)])
def test_real_file_answers_as_onnx_runtime(name, scale, real_data):
    path = real_data / "models" / f"{name}.onnx"
    _, outputs, expected = run_both(path, 2, scale)
    for output, wanted in zip(outputs, expected):
        wanted = wanted.reshape(output.shape)
        assert np.abs(output.numpy() - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())


def write_training(path: Path, reads_statistics: bool = False) -> Path:
    """A norm in training mode with its three outputs."""
    norm = ["scale", "bias", "mean", "variance"]
    nodes = [
        helper.make_node("BatchNormalization", ["x", *norm], ["y", "new_mean", "new_variance"], training_mode=1),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    values = [numpy_helper.from_array(np.array([1, 2, 3], np.float32), name) for name in norm]
    picture = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    ends = [onnx.ValueInfoProto(name=name) for name in ("z", "new_mean")[: 1 + reads_statistics]]
    graph = helper.make_graph(nodes, "norm", [picture], ends, values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_read_graph_of_training_mode_uses_recorded_statistics_and_notes_it(tmp_path: Path) -> None:
    with collect_notes() as notes:
        graph = read_graph(write_training(tmp_path / "m.onnx"))
    assert "was exported in training mode; the recorded statistics of its 1 norms are used" in notes[0]
    module = build_graph(graph.document)
    module.load_state_dict(graph.state)
    frames, recorded = torch.rand(2, 3, 8, 8), torch.tensor([1.0, 2.0, 3.0])
    wanted = torch.nn.functional.batch_norm(frames, recorded, recorded, recorded, recorded).relu()
    torch.testing.assert_close(module(frames)[0], wanted)


def test_read_graph_whose_batch_statistics_are_read_refuses_training_mode(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"BatchNormalization.* was exported in training mode.*model\.eval\(\)"):
        read_graph(write_training(tmp_path / "m.onnx", reads_statistics=True))


def test_read_graph_of_doubles_computes_in_float32_and_trains(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=TensorProto.DOUBLE),
        helper.make_node("Mul", ["b", "half"], ["c"]),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    values = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(0.5), "half")]
    picture = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    graph = helper.make_graph(nodes, "g", [picture], [onnx.ValueInfoProto(name="y")], values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    module, (output,), (wanted,) = run_both(tmp_path / "m.onnx")
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    np.testing.assert_allclose(output[0].numpy(), wanted[0], rtol=1e-5, atol=1e-5)
    module(torch.ones(1, 3, 8, 8))[0].sum().backward()
