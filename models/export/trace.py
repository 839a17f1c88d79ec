"""Traces a model into a graph of ONNX in which every weight keeps its state_dict name.

The graph is the model unchanged: norms are not folded into convolutions and equal tensors are
not merged. So a reader finds each weight, and an engine can bind a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gemel.models.detector import Detector, OneStage
from gemel.models.errors import InputError
from gemel.models.export.network_outputs import CANDIDATES, LOGITS, SUPPRESSED, NetworkOutputs
from gemel.models.export.onnx_file import BATCH_AXIS, DYNAMIC, Batch, ExportedModel, write_file
from gemel.models.files.io import check_output
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.preprocess import InputSize, height_width
from gemel.models.process import quiet

if TYPE_CHECKING:
    import onnx_ir

    from gemel.models.bundle import Bundle, BundleQuery

OPSET = 18
"""The version that torch's translations are written in, so that none is converted; ONNX Runtime reads it since 1.14."""
INPUT = "frames"
_PREFIX = "network."


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
    graph = graph_of(trace_graph(module, path, input_size, batch))
    graph.metadata.update(metadata or {})
    return write_file(graph, path)


def graph_of(model: onnx_ir.Model) -> ProtoGraph:
    """A traced graph as the messages of its file."""
    import onnx_ir

    return ProtoGraph(onnx_ir.to_proto(model))


def trace_query(
    bundle: Bundle, query: BundleQuery, batch: Batch | None
) -> tuple[ProtoGraph, NetworkOutputs]:
    """The network of a query whose document its bundle does not hold, and what its outputs mean."""
    module = bundle.build(query.id)
    graph = graph_of(trace_graph(module, bundle.path, query.input_size, batch))
    return graph, NetworkOutputs(
        _batch_of(module, batch, bundle.path) == 1, **describe_outputs(module)
    )


def describe_outputs(model: nn.Module) -> dict[str, Any]:
    """What the outputs of a traced network mean: the values of NetworkOutputs."""
    if not isinstance(model, Detector):
        return {"kind": LOGITS}
    kind = CANDIDATES if isinstance(model, OneStage) else SUPPRESSED
    limits = {"most_candidates": model.most_candidates} if isinstance(model, OneStage) else {}
    return {"kind": kind, "nms_iou": model.nms_iou, **limits}


def trace_graph(
    module: nn.Module, path: str | Path, input_size: InputSize, batch: Batch | None = None
) -> onnx_ir.Model:
    """A module as a graph whose initialisers have their state_dict keys."""
    model = _trace(module, path, input_size, _batch_of(module, batch, path))
    _tidy(model)
    return model


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
        raise InputError(
            path, f"a batch of {batch} holds nothing", "give 1 or more, or 'dynamic'", "batch"
        )
    return batch


def _output_names(module: nn.Module) -> list[str]:
    if getattr(module, "has_points", False):
        return ["boxes", "scores", *([] if isinstance(module, OneStage) else ["labels"]), "points"]
    if isinstance(module, OneStage):
        return ["boxes", "scores"]
    return ["boxes", "scores", "labels"] if isinstance(module, Detector) else ["logits"]


def _trace(
    module: nn.Module, path: str | Path, input_size: InputSize, batch: Batch
) -> onnx_ir.Model:
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
                network,
                (frames,),
                dynamic_shapes=shapes,
                prefer_deferred_runtime_asserts_over_guards=True,
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
