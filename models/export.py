"""Writes a query of a bundle as one ONNX file, from the document that the bundle holds. Needs no torch for that."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemel.models.bundle.arrays import BundleArrays
from gemel.models.bundle.documents import key_of_weight
from gemel.models.candidates import BoxReader
from gemel.models.errors import InputError, join_names
from gemel.models.extras import is_installed
from gemel.models.io import check_apart, check_output, open_atomic
from gemel.models.notes import add_note
from gemel.models.tasks import MIN_SCORE

if TYPE_CHECKING:
    import onnx

    from gemel.models.bundle import Bundle, BundleQuery
    from gemel.models.graph.proto_graph import ProtoGraph
    from gemel.models.network_outputs import NetworkOutputs

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
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The value as `gemel bundle export --json` prints it."""
        inputs, outputs = ({name: list(shape) for name, shape in one.items()} for one in (self.inputs, self.outputs))
        metadata = {key: json.loads(text) if key.startswith(OWN) else text for key, text in self.metadata.items()}
        return {
            "file": str(self.path), "opset": self.opset, "batch": self.batch, "inputs": inputs, "outputs": outputs,
            "bytes": self.nbytes, "metadata": metadata,
        }  # fmt: skip


def export_query(bundle: Bundle, query_id: str, path: str | Path, batch: Batch | None = None) -> ExportedModel:
    """Write one query of a bundle with its own tensors; classes and preprocessing are in the metadata.

    Raises InputError for an unknown query, a batch that its network does not take, a path that cannot be written and a
    network that is too large for one file.
    """
    check_apart([("--out", path)], [("the bundle", bundle.path)])
    path = check_output(path)
    return write_file(query_graph(bundle, query_id, batch), path)


def query_graph(bundle: Bundle, query_id: str, batch: Batch | None = None, kept: Collection[str] = ()) -> ProtoGraph:
    """The network of a query with its tensors, in float32, and its metadata.

    A graph that came as a file is that graph again; norms at the paths `kept` stay apart from their convolutions. A
    network that the bundle does not hold is traced, by torch.
    """
    from gemel.models.graph.fill import fill_graph
    from gemel.models.network_outputs import OUTPUTS_KEY, describe_outputs

    query = bundle.query(query_id)
    if query.stored:
        dtypes = join_names(sorted({one.dtype for one in query.stored.values()}))
        problem = f"query {query_id}: {len(query.stored)} weights stored in {dtypes} are written in float32"
        add_note(bundle.path, problem, "the bundle is smaller")
    if query.network_document is None and is_installed("torch"):
        from gemel.models.trace import trace_query

        graph, outputs = trace_query(bundle, query, batch)
    else:
        document, tensors = bundle.document_of(query_id), BundleArrays(bundle)
        outputs = describe_outputs(query, document)

        def array_of(name: str) -> np.ndarray:
            return tensors.wide_array(query, key_of_weight(query, name))

        axis = BATCH_AXIS if batch == DYNAMIC else batch
        try:
            graph = fill_graph(document, array_of, kept, query.graph is not None, axis)
        except InputError as error:
            problem = f"the graph of {query_id} {error.problem}"
            raise InputError(bundle.path, problem, error.hint, error.key) from error
        graph.metadata.pop(OUTPUTS_KEY, None)
    graph.metadata.update(metadata_of(query, outputs, bundle.digest))
    return graph


def write_file(graph: ProtoGraph, path: Path) -> ExportedModel:
    """Write a graph with its weights as one file."""
    if graph.constant_bytes > MAX_FILE_BYTES:
        hint = "it can hold 2 GiB; `gemel bundle export BUNDLE -o DIR` has no such limit"
        raise InputError(path, f"{graph.constant_bytes} bytes of weights do not fit one ONNX file", hint)
    proto = graph.to_proto()
    check_graph(proto, path)
    data = proto.SerializeToString()
    with open_atomic(path) as file:
        file.write(data)
    return describe_file(path, proto, len(data))


def describe_file(path: Path, proto: onnx.ModelProto, nbytes: int) -> ExportedModel:
    """What a written file takes and gives."""
    inputs, outputs = _shapes(proto.graph.input), _shapes(proto.graph.output)
    first = next(iter(inputs.values()))[0]
    metadata = {one.key: one.value for one in proto.metadata_props}
    opset = next(one.version for one in proto.opset_import if not one.domain)
    return ExportedModel(path, opset, first if isinstance(first, int) else DYNAMIC, inputs, outputs, nbytes, metadata)


def metadata_of(query: BundleQuery, outputs: NetworkOutputs, digest: str) -> dict[str, str]:
    """What a reader needs besides the network, as metadata_props: JSON under keys `gemel.*`."""
    from gemel.models.network_outputs import reader_of

    reader = reader_of(query, outputs)
    values = {
        "query": query.id,
        "bundle": digest[:12],
        "model": query.model,
        "task": query.task,
        "classes": query.classes,
        **_columns_of(query, outputs, reader),
        "preprocess": query.preprocess.to_json(),
        "roi": query.roi,
        "frame_size": query.frame_size,
    }
    if isinstance(reader, BoxReader):
        values |= {
            "nms_iou": reader.nms_iou,
            "min_score": query.min_score or None,
            "threshold": query.threshold,
            "least_score": max(query.min_score or query.threshold or 0.0, MIN_SCORE),
        }
    return {f"{OWN}{key}": json.dumps(value) for key, value in values.items()}


def _columns_of(query: BundleQuery, outputs: NetworkOutputs, reader: object) -> dict[str, Any]:
    """Which of the file's scores are those of the query's classes; and the names of all where there are others."""
    from gemel.models.decoders import known_names
    from gemel.models.decoders.readers import GraphBoxes, GraphLogits

    if outputs.head is None or not isinstance(reader, GraphBoxes | GraphLogits):
        return {"columns": list(range(len(query.classes)))}
    columns = {"columns": list(reader.columns)}
    if reader.columns == tuple(range(reader.decoder.width)):
        return columns
    return {**columns, "names": known_names(reader.decoder, outputs.head.metadata)}


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
        value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in values
    }
