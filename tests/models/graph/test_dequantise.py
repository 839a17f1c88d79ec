"""Files that are quantised to int8 (QDQ) are read as the float network of their weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from gemel.models.decoders.files import ModelFile
from gemel.models.errors import InputError
from gemel.models.graph import build_graph
from gemel.models.graph.onnx_reader import read_graph
from gemel.models.notes import collect_notes
from gemel.models.quantization import pack
from tests.models.graph.onnx_files import SIDE, write_classifier

FRAMES = np.random.default_rng(0).random((16, 1, 3, SIDE, SIDE), np.float32)


class Frames(CalibrationDataReader):
    """Gives each of the drawn frames once."""

    def __init__(self) -> None:
        self.frames = iter(FRAMES)

    def get_next(self):
        frame = next(self.frames, None)
        return None if frame is None else {"frames": frame}


@pytest.fixture
def int8_file(tmp_path: Path) -> Path:
    """What ONNX Runtime's static quantisation makes of a float file."""
    quantize_static(
        write_classifier(tmp_path / "float.onnx"), tmp_path / "int8.onnx", Frames(), quant_format=QuantFormat.QDQ,
        per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return tmp_path / "int8.onnx"


def test_quantised_file_is_read_as_the_float_network_of_its_weights(int8_file: Path) -> None:
    session = onnxruntime.InferenceSession(int8_file, providers=["CPUExecutionProvider"])
    wanted = np.concatenate([np.asarray(session.run(None, {"frames": frame})[0]) for frame in FRAMES])
    with collect_notes() as notes:
        graph = read_graph(int8_file)
    module = build_graph(graph.document)
    module.load_state_dict(graph.state)
    with torch.no_grad():
        (output,) = module(torch.from_numpy(np.concatenate(FRAMES)))
    spread = np.linalg.norm(wanted - wanted.mean(0))
    assert np.linalg.norm(output.numpy() - wanted) < 0.1 * spread  # ReLUs that the quantiser left out are back
    assert [note for note in notes if "is quantised to int8" in note]
    operators = {node.op_type for node in onnx.ModelProto.FromString(graph.document).graph.node}
    assert not {"QuantizeLinear", "DequantizeLinear"} & operators and "Clip" in operators


def test_weights_of_a_quantised_file_pack_into_its_codes(int8_file: Path) -> None:
    state = ModelFile(int8_file).complete().weights()
    codes = {
        onnx.numpy_helper.to_array(tensor).tobytes()
        for tensor in onnx.load(int8_file).graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 4
    }
    packed = {pack(tensor, "int8").tensor.numpy().tobytes() for tensor in state.values() if tensor.ndim == 4}
    assert packed == codes


def test_codes_of_another_scale_are_refused(int8_file: Path, tmp_path: Path) -> None:
    model = onnx.load(int8_file)
    node = next(node for node in model.graph.node if node.op_type == "DequantizeLinear" and "frames" in node.input[0])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "another"))
    node.input[1] = "another"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match=r"quantised to integers; give it with QuantizeLinear and DequantizeLinear"):
        read_graph(tmp_path / "other.onnx")
