"""Writes a graph as one ONNX file, and says what it takes and gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic

if TYPE_CHECKING:
    import onnx

    from gemel.models.graph.proto_graph import ProtoGraph

MAX_FILE_BYTES = 2**31 - 1
"""What one protobuf message can hold."""
BATCH_AXIS = "batch"
DYNAMIC = "dynamic"
Batch = int | Literal["dynamic"]
Shape = tuple[int | str, ...]
OWN = "gemel."
"""Begins the metadata keys that this project writes."""


@dataclass(frozen=True)
class ExportedModel:
    """A written file: input and outputs by name with their shapes; an axis of any size has a name instead.

    `metadata` are its metadata_props; those of this project are JSON.
    """

    path: Path
    opset: int
    batch: Batch
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    nbytes: int
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The value as `gemel bundle export --json` prints it."""
        inputs, outputs = (
            {name: list(shape) for name, shape in shapes.items()}
            for shapes in (self.inputs, self.outputs)
        )
        metadata = {
            key: json.loads(text) if key.startswith(OWN) else text
            for key, text in self.metadata.items()
        }
        return {
            "file": str(self.path),
            "opset": self.opset,
            "batch": self.batch,
            "inputs": inputs,
            "outputs": outputs,
            "bytes": self.nbytes,
            "metadata": metadata,
        }


def write_file(graph: ProtoGraph, path: Path) -> ExportedModel:
    """Write a graph with its weights as one file."""
    if graph.constant_bytes > MAX_FILE_BYTES:
        hint = "it can hold 2 GiB; `gemel bundle export BUNDLE -o DIR` has no such limit"
        raise InputError(
            path, f"{graph.constant_bytes} bytes of weights do not fit one ONNX file", hint
        )
    proto = graph.to_proto()
    check_graph(proto, path)
    data = proto.SerializeToString()
    with open_atomic(path) as file:
        file.write(data)
    return describe_file(path, proto, len(data))


def describe_file(path: Path, proto: onnx.ModelProto, nbytes: int) -> ExportedModel:
    """What a written file takes and gives."""
    inputs = _shapes(proto.graph.input)
    outputs = _shapes(proto.graph.output)
    first = next(iter(inputs.values()))[0]
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    opset = next(entry.version for entry in proto.opset_import if not entry.domain)
    return ExportedModel(
        path, opset, first if isinstance(first, int) else DYNAMIC, inputs, outputs, nbytes, metadata
    )


def check_graph(model: onnx.ModelProto | Path, path: Path) -> None:
    """Raise InputError for `path` unless a graph, or a file that refers to its weights, is sound ONNX."""
    import onnx

    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        fault = f"the exported model is not sound: {' '.join(str(error).split())[:200]}"
        raise InputError(path, fault, "report it, with the model") from error


def _shapes(values: Any) -> dict[str, Shape]:
    return {
        value.name: tuple(
            axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim
        )
        for value in values
    }
