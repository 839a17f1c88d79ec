"""Compute a query's int8 weights in integers where its answers hold: ranges of activations, measured on train frames.

What is tried is what a box runs: the query's graph in ONNX Runtime, on the frames that a search goes by.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from gemel.merger.budget import Budget
from gemel.merger.checkpoint import storable
from gemel.merger.context import MergeContext
from gemel.merger.quantize import CONFIG
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.bundle.format import Entry
from gemel.models.bundle.manifest import ActivationRange, StoredTensor
from gemel.models.bundle.query_documents import parse_document
from gemel.models.bundle.stored_arrays import BundleArrays
from gemel.models.decoders.graph_model import GraphAnswers
from gemel.models.detector import Detector
from gemel.models.errors import message_of
from gemel.models.export.export_document import export_documents
from gemel.models.graph.activations import measure_errors, measure_ranges, name_places, use_exact_products
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.graph.query_graph import build_query_graph, count_norm_uses
from gemel.models.graph.stored import store_graph
from gemel.models.notes import add_note
from gemel.models.objects.candidates import BoxReader
from gemel.models.quantization import PackedWeight

OUT_OF_TIME = "the budget was over"
CALIBRATION_FRAMES = 64
"""Frames of train on which ranges are measured, evenly spread."""
MAX_WIDE_FRACTION = 0.1
"""Of a query's activations, how many may stay in float32: a YOLOX-nano with more takes longer than in float32."""
MIN_SPREAD = 0.02
"""Mean difference of calibration frames from their mean picture, in parts of that picture's deviation, below which they
count as alike: noise of a camera that sees nothing move is 0.01."""


@storable
@dataclass(frozen=True)
class Computed:
    """The ranges of a query's activations, empty where all stay in float32, and its ratio so.

    `wide` activations stay in float32 beside those that have a range; `why` is there where all of them do.
    """

    ranges: dict[str, ActivationRange]
    ratio: float
    wide: int = 0
    why: str = ""


class QueryNetwork:
    """The graph of one query with its weights in memory, as a box prepares it.

    `packed` are its packed weights by state dict key. Raises ValueError for a document that the gate refuses.
    """

    def __init__(
        self, record: BundleQuery, document: bytes, model: nn.Module, packed: Mapping[str, PackedWeight]
    ) -> None:
        tensors, stored = dict(model.state_dict()), {}
        for key, weight in packed.items():
            scale = None if weight.scale is None else f"{key}.scale"
            tensors |= {key: weight.tensor} if scale is None else {key: weight.tensor, scale: weight.scale}
            stored[key] = StoredTensor(weight.width, scale, weight.shape)
        self._arrays = {key: tensor.detach().cpu().numpy() for key, tensor in tensors.items()}
        self._record = replace(record, tensors={key: key for key in model.state_dict()}, stored=stored)
        proto = parse_document(record, document)
        self._document = proto if proto.graph.value_info else onnx.shape_inference.infer_shapes(proto)
        self.places = name_places(self._document)

    def build(self, ranges: Mapping[str, ActivationRange]) -> ProtoGraph:
        """The graph with activations of these ranges in eight bits."""
        record = replace(self._record, activations=dict(ranges))
        header = {name: Entry(name, "", array.shape, 0, array.nbytes) for name, array in self._arrays.items()}
        uses = count_norm_uses([record], lambda _: self._document)
        return build_query_graph(record, self._document, self._arrays.__getitem__, uses, header, in_integers=True)

    def measure(self, frames: Tensor) -> dict[str, ActivationRange]:
        """The ranges over frames f32 (N, 3, H, W); empty where nothing is computed in integers."""
        parts = (part.numpy() for part in frames.cpu().contiguous().split(1))
        return measure_ranges(self.build({}), self.places, parts)

    def answerer(self, model: nn.Module, ranges: Mapping[str, ActivationRange]) -> nn.Module:
        """A module that answers as a box does, in place of the model: same outputs, same reader."""
        return replace_network(model, SessionRun(self.build(ranges)))


class SessionRun:
    """Runs frames f32 (N, 3, H, W) through a model in ONNX Runtime; outputs as tensors."""

    def __init__(self, graph: ProtoGraph) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, torch.get_num_threads()
        use_exact_products(options)
        data = graph.to_proto().SerializeToString()
        self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0]

    def __call__(self, frames: Tensor) -> tuple[Tensor, ...]:
        parts = frames.split(1) if self._input.shape[0] == 1 else (frames,)
        answers = [
            self._session.run(None, {self._input.name: np.ascontiguousarray(part.cpu().numpy())}) for part in parts
        ]
        return tuple(torch.from_numpy(np.concatenate(outputs)) for outputs in zip(*answers, strict=True))


def replace_network(model: nn.Module, run: SessionRun) -> nn.Module:
    """The model with its network in ONNX Runtime; parameters are shared, and not read."""
    if isinstance(model, GraphAnswers):
        answers = copy.copy(model)
        answers._run = run  # type: ignore[assignment]
        return answers
    return _DetectorInSession(model, run) if isinstance(model, Detector) else _NetworkInSession(model, run)


class _NetworkInSession(nn.Module):
    def __init__(self, model: nn.Module, run: SessionRun) -> None:
        super().__init__()
        self.model, self._session = model, run

    def forward(self, frames: Tensor) -> Any:
        outputs = self._session(frames)
        return outputs[0] if len(outputs) == 1 else outputs


class _DetectorInSession(Detector):
    def __init__(self, model: Detector, run: SessionRun) -> None:
        super().__init__()
        self.model, self._session, self.nms_iou, self.has_points = model, run, model.nms_iou, model.has_points

    @property
    def reader(self) -> BoxReader:
        assert isinstance(self.model, Detector)
        return self.model.reader

    def forward(self, frames: Tensor) -> tuple[Tensor, ...]:
        return self._session(frames)


def build_answerer(bundle: Bundle, query: str, device: str | torch.device = "cpu") -> nn.Module:
    """What answers a query of a bundle as a box does: in integers, where it has ranges of activations."""
    record, model = bundle.query(query), bundle.build(query, device)
    if not record.activations:
        return model
    tensors = BundleArrays(bundle)
    document, uses = tensors.document_of(record), count_norm_uses([record], tensors.document_of)
    graph = build_query_graph(record, document, tensors.array_of, uses, tensors.header)
    return replace_network(model, SessionRun(graph))


def open_network(
    ctx: MergeContext, query: str, model: nn.Module, packed: Mapping[str, PackedWeight]
) -> QueryNetwork | None:
    """The graph of a query's merged model; None where it cannot be exported."""
    record = BundleQuery.of(ctx.queries[query])
    if isinstance(model, GraphAnswers):
        document = store_graph(model.source)
        return QueryNetwork(replace(record, graph=record.model), document, model, packed)
    document = export_documents({query: model}, [record], ctx.documents).get(query)
    return None if document is None else QueryNetwork(record, document, model, packed)


def compute_query(
    ctx: MergeContext,
    query: str,
    model: nn.Module,
    packed: Mapping[str, PackedWeight],
    required: float,
    stored_ratio: float,
    known: Mapping[str, ActivationRange] | None,
    budget: Budget,
) -> Computed | None:
    """A query's ranges on train frames, empty where its ratio falls too far so; None where nothing is computed.

    Ranges that are `known`, of the same network in other bits, are not measured again. All stay in float32 once the
    budget is over.

    It falls too far below the required ratio, or, where packed weights alone (`stored_ratio`) miss that, by more than
    1 - kept_fraction. Then the activations that move its heads most stay in float32: 1, 2, 4 ... of them, up to
    `MAX_WIDE_FRACTION`.
    """
    if budget.over:
        add_note(query, f"its packed weights are not computed in integers: {OUT_OF_TIME}")
        return None
    network = open_network(ctx, query, model, packed)
    if network is None:
        return None
    data = ctx.train[query]
    try:
        frames = data.frames(data.spread(CALIBRATION_FRAMES), ctx.device)
        ranges = known or network.measure(frames)
        if not ranges:
            return None
        if are_alike(frames):
            why = f"all {len(frames)} train frames that could calibrate its activations are alike"
            return Computed({}, stored_ratio, len(ranges), why)
        return _fit_ranges(ctx, query, model, network, frames, ranges, required, stored_ratio, budget)
    except Exception as error:  # ONNX Runtime's errors have no common type
        add_note(query, f"its packed weights are not computed in integers: {message_of(error)[:200]}")
        return None


def _fit_ranges(
    ctx: MergeContext,
    query: str,
    model: nn.Module,
    network: QueryNetwork,
    frames: Tensor,
    ranges: Mapping[str, ActivationRange],
    required: float,
    stored_ratio: float,
    budget: Budget,
) -> Computed:
    """The most ranges with which the query reaches the least ratio."""
    least = min(required, CONFIG.kept_fraction * stored_ratio)
    order, wide, ratio = list(ranges), 0, 0.0
    while wide <= max(1, MAX_WIDE_FRACTION * len(ranges)) and not budget.over:
        kept = {place: ranges[place] for place in order[wide:]}
        ratio = ctx.ratio(query, network.answerer(model, kept))
        if ratio >= least:
            return Computed(kept, ratio, wide)
        if not wide:
            errors = measure_errors(network.build({}), network.places, ranges, frames[:1].cpu().numpy())
            order.sort(key=errors.__getitem__, reverse=True)
        wide = max(1, 2 * wide)
    why = OUT_OF_TIME if budget.over else f"in integers it reaches {ratio:.3f} of its original"
    return Computed({}, stored_ratio, len(ranges), why)


def are_alike(frames: Tensor) -> bool:
    """Whether frames (N, ...) differ from their mean by less than noise: their ranges say nothing of other frames."""
    mean = frames.mean(0, keepdim=True)
    return float((frames - mean).abs().mean()) <= MIN_SPREAD * float(mean.std())
