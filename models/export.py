"""Writes a model as one ONNX file in which every weight keeps its state_dict name.

The file is the model unchanged: norms are not folded into convolutions and equal tensors are
not merged. So a reader finds each weight, and an engine can bind a shared one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gemel.models.detector import Detector, OneStage
from gemel.models.errors import InputError, join_names
from gemel.models.io import check_apart, check_output, open_atomic
from gemel.models.notes import add_note
from gemel.models.preprocess import InputSize, height_width
from gemel.models.process import quiet
from gemel.models.tasks import MIN_SCORE

if TYPE_CHECKING:
    import onnx
    import onnx_ir

    from gemel.models.bundle import Bundle, BundleQuery

OPSET = 18
"""The version that torch's translations are written in, so that none is converted; ONNX Runtime reads it since 1.14."""
MAX_FILE_BYTES = 2**31 - 1
"""What one protobuf message can hold."""
INPUT = "frames"
BATCH_AXIS = "batch"
DYNAMIC = "dynamic"
Batch = int | Literal["dynamic"]
Shape = tuple[int | str, ...]
_PREFIX = "network."
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


def export_onnx(
    module: nn.Module,
    path: str | Path,
    input_size: InputSize,
    batch: Batch | None = None,
    metadata: Mapping[str, str] | None = None,
) -> ExportedModel:
    """Write `module` in eval mode as an ONNX file that takes `frames`, f32 (N, 3, H, W), normalised.

    Outputs: a classifier's `logits` (N, C); a one-stage detector's `boxes` (N, A, 4) and `scores` (N, A, C), to be
    suppressed by the reader; a two-stage detector's `boxes` (N, D, 4), `scores` and `labels` (N, D), suppressed. Boxes
    are x0 y0 x1 y1 in fractions of the input, labels count from 0. `batch` is N or "dynamic"; by default it is dynamic,
    and 1 for a two-stage detector, which needs a fixed one. `metadata`, JSON by name, goes into the file's
    metadata_props.

    Raises InputError when the path cannot be written, the model is too large for one file or cannot be exported.
    """
    path = check_output(path)
    model = trace_graph(module, path, input_size, batch)
    model.metadata_props.update(metadata or {})
    return _write_file(model, path)


def export_query(bundle: Bundle, query_id: str, path: str | Path, batch: Batch | None = None) -> ExportedModel:
    """Write one query of a bundle with its own tensors; classes and preprocessing are in the metadata.

    Raises InputError for an unknown query and as `export_onnx` does.
    """
    check_apart([("--out", path)], [("the bundle", bundle.path)])
    path = check_output(path)
    return _write_file(query_graph(bundle, query_id, batch), path)


def query_graph(bundle: Bundle, query_id: str, batch: Batch | None = None, kept: Collection[str] = ()) -> onnx_ir.Model:
    """The network of a query with its tensors, in float32, and its metadata.

    A graph that came as a file is that graph again; norms at the paths `kept` stay apart from their convolutions.
    """
    query = bundle.query(query_id)
    module = bundle.build(query_id)
    if query.stored:
        dtypes = join_names(sorted({one.dtype for one in query.stored.values()}))
        problem = f"query {query_id}: {len(query.stored)} weights stored in {dtypes} are written in float32"
        add_note(bundle.path, problem, "the bundle is smaller")
    if query.graph is None:
        model = trace_graph(module, bundle.path, query.input_size, batch)
    else:
        model = _imported_graph(bundle, query, batch, kept)
    model.metadata_props.update(metadata_of(query, module, bundle.digest))
    return model


def _imported_graph(bundle: Bundle, query: BundleQuery, batch: Batch | None, kept: Collection[str]) -> onnx_ir.Model:
    from gemel.models.graph.fill import fill_graph

    document = bundle.tensor(str(query.graph)).numpy().tobytes()
    model = fill_graph(document, lambda key: bundle.wide_tensor(query.id, f"{_PREFIX}{key}"), kept)
    own = next(value.shape[0] for value in model.graph.inputs if value.shape is not None and len(value.shape) == 4)
    if isinstance(batch, int) and batch < 1:
        raise InputError(bundle.path, f"a batch of {batch} holds nothing", "give 1 or more, or 'dynamic'", "batch")
    if batch is not None and isinstance(own, int) and batch != own:
        raise InputError(bundle.path, f"the graph of {query.id} takes batches of {own}", "leave this out", "batch")
    if isinstance(batch, int):
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.shape is not None and len(value.shape) and value.shape[0] == own:
                value.shape = type(value.shape)([batch, *value.shape[1:]])
    return model


def trace_graph(
    module: nn.Module, path: str | Path, input_size: InputSize, batch: Batch | None = None
) -> onnx_ir.Model:
    """A module as a graph whose initialisers have their state_dict keys."""
    model = _trace(module, path, input_size, _batch_of(module, batch, path))
    _tidy(model)
    return model


def _write_file(model: onnx_ir.Model, path: Path) -> ExportedModel:
    """Write a graph with its weights as one file."""
    nbytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    if nbytes > MAX_FILE_BYTES:
        hint = "it can hold 2 GiB; `gemel bundle export BUNDLE -o DIR` has no such limit"
        raise InputError(path, f"{nbytes} bytes of weights do not fit one ONNX file", hint)
    proto = _sound_proto(model, path)
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


def metadata_of(query: BundleQuery, module: nn.Module, digest: str) -> dict[str, str]:
    """What a reader needs besides the network, as metadata_props: JSON under keys `gemel.*`."""
    values = {
        "query": query.id,
        "bundle": digest[:12],
        "model": query.model,
        "task": query.task,
        "classes": query.classes,
        **_columns_of(module, query.classes),
        "preprocess": query.preprocess.to_json(),
        "roi": query.roi,
        "frame_size": query.frame_size,
    }
    if isinstance(module, Detector):
        values |= {
            "nms_iou": module.nms_iou,
            "min_score": query.min_score or None,
            "threshold": query.threshold,
            "least_score": max(query.min_score or query.threshold or 0.0, MIN_SCORE),
        }
    return {f"{OWN}{key}": json.dumps(value) for key, value in values.items()}


def _columns_of(module: nn.Module, classes: Sequence[str]) -> dict[str, Any]:
    """Which of the file's scores are those of the query's classes; and the names of all where there are others."""
    from gemel.models.decoders import known_names
    from gemel.models.decoders.graph_model import GraphClassifier, GraphDetector

    if not isinstance(module, GraphClassifier | GraphDetector):
        return {"columns": list(range(len(classes)))}
    reader = module.boxes if isinstance(module, GraphDetector) else module.logits
    columns = {"columns": list(reader.columns)}
    if reader.columns == tuple(range(module.decoder.width)):
        return columns
    return {**columns, "names": known_names(module.decoder, module.head.metadata)}


class _Exported(nn.Module):
    """A model as a network from frames to the outputs of the file."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: Tensor) -> Any:
        if isinstance(self.network, Detector):
            return self.network.export_outputs(frames)
        return self.network(frames)


def _batch_of(module: nn.Module, batch: Batch | None, path: str | Path) -> Batch:
    two_stage = isinstance(module, Detector) and not isinstance(module, OneStage)
    if batch is None:
        return 1 if two_stage else DYNAMIC
    if batch == DYNAMIC and two_stage:
        raise InputError(path, "a two-stage detector needs a fixed batch", "give a number", "batch")
    if batch != DYNAMIC and batch < 1:
        raise InputError(path, f"a batch of {batch} holds nothing", "give 1 or more, or 'dynamic'", "batch")
    return batch


def _output_names(module: nn.Module) -> list[str]:
    if getattr(module, "has_points", False):
        return ["boxes", "scores", *([] if isinstance(module, OneStage) else ["labels"]), "points"]
    if isinstance(module, OneStage):
        return ["boxes", "scores"]
    return ["boxes", "scores", "labels"] if isinstance(module, Detector) else ["logits"]


def _trace(module: nn.Module, path: str | Path, input_size: InputSize, batch: Batch) -> onnx_ir.Model:
    """The network as torch's exporter translates it, without its optimiser, which folds norms into convolutions."""
    # An example of one frame would make 1 a constant of the network.
    frames = torch.zeros(2 if batch == DYNAMIC else batch, 3, *height_width(input_size))
    shapes = ({0: torch.export.Dim(BATCH_AXIS, min=1)},) if batch == DYNAMIC else None
    was_training = module.training
    network = _Exported(module).eval()
    try:
        with quiet(), torch.no_grad():
            # Captured here and not by the exporter, which tries other ways after a failure and hides its reason.
            graph = torch.export.export(
                network, (frames,), dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
            )
            program = torch.onnx.export(
                graph,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=_output_names(module),
                dynamic_shapes=({0: BATCH_AXIS},) if batch == DYNAMIC else None,
                verbose=False,
            )
    except Exception as error:  # a user's forward can fail in any way
        cause = " ".join(str(error.__cause__ or error).split())[:200]
        remedy = "its forward must be tensor operations only"
        if batch == DYNAMIC:
            remedy += ", with any batch; or give a fixed batch"
        raise InputError(path, f"the model cannot be exported: {cause}", remedy) from error
    finally:
        module.train(was_training)
    assert program is not None
    return program.model


def _tidy(model: onnx_ir.Model) -> None:
    """Name initialisers as the state dict does, compute what depends on constants alone, drop traces of the source."""
    import onnx_ir.passes.common as common
    from onnxscript.optimizer import fold_constants

    weights = set(model.graph.initializers.values())

    def only_constants(node: onnx_ir.Node) -> bool | None:
        return False if any(value in weights for value in node.inputs) else None

    fold_constants(model, should_fold=only_constants)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    for value in list(model.graph.initializers.values()):
        value.name = (value.name or "").removeprefix(_PREFIX)


def check_graph(model: onnx.ModelProto | Path, path: Path) -> None:
    """Raise InputError for `path` unless a graph, or a file that refers to its weights, is sound ONNX."""
    import onnx

    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        fault = f"the exported model is not sound: {' '.join(str(error).split())[:200]}"
        raise InputError(path, fault, "report it, with the model") from error


def _sound_proto(model: onnx_ir.Model, path: Path) -> onnx.ModelProto:
    import onnx_ir

    proto = onnx_ir.to_proto(model)
    check_graph(proto, path)
    return proto


def _shapes(values: Any) -> dict[str, Shape]:
    return {
        value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in values
    }
