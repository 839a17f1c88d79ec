"""Graphs read from ONNX files: the same answers as ONNX Runtime, at any batch, with gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from models.graph import build_graph, load_graph


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
