"""Imported networks as models of this project: a graph, and a decoder that says what its outputs mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.decoders import choose_columns, choose_decoder
from models.decoders.activations import MOVING, find_activations, source_operator
from models.decoders.classifier import Classifier
from models.decoders.losses import dense_loss, distill_outputs, matched_loss, rows_by_level
from models.decoders.outputs import DECODED_TASKS, RawOutputs, find_outputs
from models.decoders.registry import Boxes, Decoder, GraphHead, Output, Poses
from models.detector import BoxTarget, Candidates, OneStage, PoseTarget, places_from

if TYPE_CHECKING:
    import onnx
    from torch.fx import GraphModule, Node

    from models.graph import Graph

BATCH, PER_FRAME = "batch", "*batch"
"""A free size of a graph, and the end of one that grows with it."""
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
LAYER_TYPES = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


class GraphAnswers(nn.Module):
    """`network` is the graph and `head` describes its outputs; a graph of one frame runs once for each frame.

    `source` is the graph without weights, which a bundle holds.
    """

    source: Graph

    def __init__(self, network: GraphModule, head: GraphHead, one_by_one: bool) -> None:
        super().__init__()
        self.network, self.head, self.one_by_one = network, head, one_by_one

    @cached_property
    def activations(self) -> list[Tensor]:
        """The Activation of each element of the outputs, each (1, ...)."""
        found = find_activations(self.network, self.head.size)
        return [one.reshape(1, *output.shape) for one, output in zip(found, self.head.outputs, strict=True)]

    def answer(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Every output of the graph as (N, ...)."""
        parts = frames.split(1) if self.one_by_one else (frames,)
        answers = [_as_tuple(self._run(part)) for part in parts]
        return tuple(
            torch.cat([_by_frame(one, output) for one in same]) if self.one_by_one else _by_frame(same[0], output)
            for same, output in zip(zip(*answers, strict=True), self.head.outputs, strict=True)
        )

    def _run(self, frames: Tensor) -> Any:
        if not frames.is_meta:
            return self.network(frames)
        # Constants keep their values when a model is built on the meta device; integers are sizes.
        buffers = self.network.named_buffers()
        constants = {name: tensor.to("meta") for name, tensor in buffers if tensor.is_floating_point()}
        return functional_call(self.network, constants, (frames,))


class GraphDetector(GraphAnswers, OneStage):
    """x f32 (N, 3, H, W) as the decoder's family prepares it -> the outputs of the graph, each (N, ...).

    `columns` are the scores of the query's classes.
    """

    def __init__(
        self, network: GraphModule, head: GraphHead, decoder: Decoder, columns: Sequence[int], one_by_one: bool = False
    ) -> None:
        super().__init__(network, head, one_by_one)
        self.decoder, self.columns, self.nms_iou = decoder, list(columns), decoder.nms_iou
        self.has_points = decoder.task == "keypoints"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.answer(x)

    def decode(self, outputs: Sequence[Tensor], **rows: Tensor) -> Boxes | Poses:
        """The decoder's candidates, with the scores of the query's classes alone."""
        boxes, scores, *points = self.decoder.decode(outputs, self.head.size, **rows)
        scores = scores if len(self.columns) == scores.shape[-1] else scores[..., self.columns]
        return (boxes, scores, points[0]) if points else (boxes, scores)

    def candidates(self, outputs: Sequence[Tensor], min_score: float) -> list[Candidates]:
        """As OneStage; of a bounded family only the rows are decoded that can reach `min_score`."""
        if not self.decoder.bounded:
            return super().candidates(outputs, min_score)
        found = []
        for values in outputs[0]:
            rows = places_from(values[:, 4], min_score)
            boxes, scores, *_ = self.decode((values[rows][None],), rows=rows)
            found.append(self.best_candidates(boxes[0], scores[0], min_score=min_score))
        return found

    def loss(self, outputs: Sequence[Tensor], targets: Sequence[BoxTarget] | Sequence[PoseTarget]) -> Tensor:
        """Of the decoded boxes, scores and points; one row answers for an object where no suppression follows."""
        boxes, scores, *points = self.decode(outputs)
        measure = matched_loss if self.nms_iou is None else dense_loss
        return measure(boxes, scores, targets, points[0] if points else None)

    def distill(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Of the graph's outputs, rows weighted by the larger of both models' best scores."""
        with torch.no_grad():
            best = torch.maximum(*(self.decode(each)[1].amax(dim=2) for each in (outputs, teacher)))
        return distill_outputs(outputs, teacher, self.activations, rows_by_level(best, outputs))


class GraphClassifier(GraphAnswers):
    """x f32 (N, 3, H, W) -> logits (N, C) of the query's classes."""

    def __init__(
        self,
        network: GraphModule,
        head: GraphHead,
        decoder: Classifier,
        columns: Sequence[int],
        one_by_one: bool = False,
    ) -> None:
        super().__init__(network, head, one_by_one)
        self.decoder, self.columns = decoder, list(columns)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.decoder.logits(self.answer(x))
        return logits if self.columns == list(range(logits.shape[1])) else logits[:, self.columns]

    def decode(self, outputs: Tensor) -> Tensor:
        """The probabilities (N, C) of logits."""
        return outputs.softmax(1)


class GraphTensors(GraphAnswers):
    """x f32 (N, 3, H, W) -> the outputs of the graph that its task is about: one tensor, or a tuple of them all."""

    def __init__(self, network: GraphModule, head: GraphHead, decoder: RawOutputs, one_by_one: bool = False) -> None:
        super().__init__(network, head, one_by_one)
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.decoder.choose(self.answer(x))

    def decode(self, outputs: Any) -> Any:
        """The outputs as they are."""
        return outputs


GraphModel = GraphDetector | GraphClassifier | GraphTensors


def build_model(
    graph: Graph, decoder: str, task: str, classes: Sequence[str], where: str | Path, device: str | torch.device = "cpu"
) -> GraphModel:
    """The model of a query with the graph's weights; on the device "meta", or from a graph without weights, with none.

    Raises InputError when no decoder fits, or the classes do not.
    """
    from models.graph import build_graph

    head = head_of(graph)
    chosen: Decoder | RawOutputs
    if task in DECODED_TASKS:
        chosen = choose_decoder(decoder, head, task, len(classes), where)
    else:
        chosen = find_outputs(head, task, len(classes), where)
    columns = () if isinstance(chosen, RawOutputs) else choose_columns(chosen, head.metadata, classes, where)
    network = build_graph(graph.document, device)
    if graph.state and torch.device(device).type != "meta":
        network.load_state_dict(graph.state)
    one_by_one = graph.input.shape[0] != BATCH or any(one.axis is None for one in head.outputs)
    model: GraphModel
    if isinstance(chosen, RawOutputs):
        model = GraphTensors(network, head, chosen, one_by_one)
    elif isinstance(chosen, Classifier):
        model = GraphClassifier(network, head, chosen, columns, one_by_one)
    else:
        model = GraphDetector(network, head, chosen, columns, one_by_one)
    model.source = replace(graph, state={})
    return model


def head_of(graph: Graph) -> GraphHead:
    """What a graph's outputs look like for one frame."""
    import onnx

    batch, _, height, width = graph.input.shape
    document = onnx.load_from_string(graph.document)
    tails, makers = tails_of(document), {name: node for node in document.graph.node for name in node.output}
    outputs = []
    for one in graph.outputs:
        shape = one.shape[1:] if one.shape[:1] == (batch,) else one.shape
        sides = tuple(int(str(side).removesuffix(PER_FRAME).replace(BATCH, "1")) for side in shape)
        axis = next((place for place, side in enumerate(one.shape) if BATCH in str(side)), None)
        form = box_form(makers, one.name) if sides[-1:] == (4,) else (False, False)
        outputs.append(Output(one.name, sides, tails.get(one.name, frozenset()), axis, *form))
    is_whole = graph.given is not None and graph.given.dtype == "uint8"
    return GraphHead(tuple(outputs), (int(height), int(width)), graph.metadata, graph.cut, is_whole)


def tails_of(model: onnx.ModelProto) -> dict[str, frozenset[str]]:
    """The operators between each output and the layers that it comes from."""
    makers = {name: node for node in model.graph.node for name in node.output}
    tails = {}
    for output in model.graph.output:
        found, left, seen = set(), [output.name], set()
        while left:
            node = makers.get(left.pop())
            if node is None or node.op_type in LAYERS or id(node) in seen:
                continue
            seen.add(id(node))
            found.add(node.op_type)
            left += node.input
        tails[output.name] = frozenset(found)
    return tails


def box_form(makers: Mapping[str, onnx.NodeProto], name: str) -> tuple[bool, bool]:
    """Whether an output joins differences, then as many sums; and whether it was multiplied by constants last."""
    is_scaled, node = False, _without_moves(makers, name)
    while node is not None and node.op_type in ("Mul", "Div", "Clip"):
        picture = [one for one in node.input if one in makers]
        if node.op_type != "Clip":
            if len(picture) != 1:
                return False, is_scaled
            is_scaled = node.op_type == "Mul"
        node = _without_moves(makers, picture[0])
    if node is None or node.op_type != "Concat":
        return False, is_scaled
    parts = [_without_moves(makers, one) for one in node.input]
    kinds, half = [part.op_type if part is not None else "" for part in parts], len(parts) // 2
    return kinds == ["Sub"] * half + ["Add"] * half and half > 0, is_scaled


def _without_moves(makers: Mapping[str, onnx.NodeProto], name: str) -> onnx.NodeProto | None:
    """What made a value, beyond operators that move the elements of one tensor."""
    node = makers.get(name)
    while node is not None and node.op_type in MOVING - {"Concat"}:
        node = makers.get(node.input[0])
    return node


def last_layers(network: GraphModule) -> tuple[str, ...]:
    """Paths of the convolutions and linear layers that no other one follows.

    One that reads probabilities, such as the mean of YOLOv8's distances to a box's sides, counts as none.
    """
    found: dict[str, None] = {}
    followed: set[Node] = set()
    for node in reversed(network.graph.nodes):
        is_layer = (
            node.op == "call_module"
            and isinstance(network.get_submodule(str(node.target)), LAYER_TYPES)
            and source_operator(node) != "Softmax"
        )
        if is_layer and node not in followed:
            found[str(node.target)] = None
        if is_layer or node in followed:
            followed.update(node.all_input_nodes)
    return tuple(reversed(found))


def _by_frame(values: Tensor, output: Output) -> Tensor:
    """An output as (N, ...) where its frames follow each other in another axis."""
    if output.axis:
        values = values.unflatten(output.axis, (-1, output.shape[output.axis])).movedim(output.axis, 0)
    return values.reshape(-1 if values.numel() else len(values), *output.shape)


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
