"""Static int8 of ONNX Runtime as its guide says: prepared, QDQ, weights per channel, ranges from frames.

python benchmarks/compare/quantize.py MODEL.onnx INPUTS.npz OUT.onnx
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
from child import read_pictures  # pyright: ignore[reportMissingImports]
from onnx import version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

MIN_OPSET = 13
"""Of scales per channel."""


class Frames(CalibrationDataReader):
    """The pictures of a file, one at a time, as the model takes them."""

    def __init__(self, name: str, inputs: str) -> None:
        read = read_pictures(inputs)
        self.frames = ({name: read.prepare(picture)} for picture in read.pictures)

    def get_next(self) -> Any:
        """The next frame, None after the last."""
        return next(self.frames, None)


def main() -> None:
    """Quantise one file."""
    model, inputs, out = sys.argv[1:]
    prepared = Path(out).with_suffix(".prepared.onnx")
    document = onnx.load(model)
    if document.opset_import[0].version < MIN_OPSET:
        document = version_converter.convert_version(document, MIN_OPSET)
    onnx.save(document, prepared)
    quant_pre_process(str(prepared), str(prepared), skip_symbolic_shape=True)
    name = onnx.load(prepared).graph.input[0].name
    quantize_static(str(prepared), out, Frames(name, inputs), quant_format=QuantFormat.QDQ, per_channel=True)
    prepared.unlink()


if __name__ == "__main__":
    main()
