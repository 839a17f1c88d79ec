"""Imported networks as models of this project: a graph, and a decoder that says what its outputs mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gemel.models.decoders.decoder import Boxes, GraphHead, Poses
from gemel.models.decoders.heads import BATCH, head_of
from gemel.models.decoders.last_activations import find_activations, source_operator
from gemel.models.decoders.losses import dense_loss, distill_outputs, matched_loss, rows_by_level
from gemel.models.decoders.outputs import RawOutputs
from gemel.models.decoders.readers import GraphBoxes, GraphLogits, choose_reader
from gemel.models.detector import BoxTarget, OneStage, PoseTarget
from gemel.models.graph.steps import StepKind, StepNetwork

if TYPE_CHECKING:
    from gemel.models.graph import Graph

LAYER_TYPES = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


class GraphAnswers(nn.Module):
    """`network` is the graph and `head` describes its outputs; a graph of one frame runs once for each frame.

    `source` is the graph without weights, which a bundle holds.
    """

    source: Graph

    def __init__(self, network: StepNetwork, head: GraphHead, one_by_one: bool) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.one_by_one = one_by_one

    @cached_property
    def activations(self) -> list[Tensor]:
        """The Activation of each element of the outputs, each (1, ...)."""
        activations = find_activations(self.network, self.head.size)
        return [
            activation.reshape(1, *output.shape)
            for activation, output in zip(activations, self.head.outputs, strict=True)
        ]

    def answer(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Every output of the graph as (N, ...)."""
        parts = frames.split(1) if self.one_by_one else (frames,)
        answers = [_as_tuple(self._run(part)) for part in parts]
        return tuple(
            torch.cat([output.by_frame(answer) for answer in same])
            if self.one_by_one
            else output.by_frame(same[0])
            for same, output in zip(zip(*answers, strict=True), self.head.outputs, strict=True)
        )

    def _run(self, frames: Tensor) -> Any:
        if not frames.is_meta:
            return self.network(frames)
        # Constants keep their values when a model is built on the meta device; integers are sizes.
        buffers = self.network.named_buffers()
        constants = {
            name: tensor.to("meta") for name, tensor in buffers if tensor.is_floating_point()
        }
        return functional_call(self.network, constants, (frames,))


class GraphDetector(GraphAnswers, OneStage):
    """x f32 (N, 3, H, W) as the decoder's family prepares it -> the outputs of the graph, each (N, ...)."""

    def __init__(
        self, network: StepNetwork, head: GraphHead, boxes: GraphBoxes, one_by_one: bool = False
    ) -> None:
        super().__init__(network, head, one_by_one)
        self.boxes = boxes
        self.decoder = boxes.decoder
        self.nms_iou = boxes.nms_iou
        self.has_points = boxes.decoder.task == "keypoints"

    @property
    def reader(self) -> GraphBoxes:
        """Reads the graph's outputs."""
        return self.boxes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.answer(x)

    def decode(self, outputs: Sequence[Tensor]) -> Boxes | Poses:
        """The decoder's candidates, with the scores of the query's classes alone."""
        return self.boxes.decode(outputs)

    def finish_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """The graph's outputs as they are."""
        return outputs

    def export_outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Boxes and scores."""
        return self.decode(self(x))

    def loss(
        self, outputs: Sequence[Tensor], targets: Sequence[BoxTarget] | Sequence[PoseTarget]
    ) -> Tensor:
        """Of the decoded boxes, scores and points; one row answers for an object where no suppression follows."""
        boxes, scores, *points = self.decode(outputs)
        measure = matched_loss if self.nms_iou is None else dense_loss
        return measure(boxes, scores, targets, points[0] if points else None)

    def distill(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Of the graph's outputs, rows weighted by the larger of both models' best scores."""
        with torch.no_grad():
            best = torch.maximum(
                *(self.decode(answers)[1].amax(dim=2) for answers in (outputs, teacher))
            )
        return distill_outputs(outputs, teacher, self.activations, rows_by_level(best, outputs))


class GraphClassifier(GraphAnswers):
    """x f32 (N, 3, H, W) -> logits (N, C) of the query's classes."""

    def __init__(
        self, network: StepNetwork, head: GraphHead, logits: GraphLogits, one_by_one: bool = False
    ) -> None:
        super().__init__(network, head, one_by_one)
        self.logits = logits
        self.decoder = logits.decoder

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.answer(self.answer(x))

    def decode(self, outputs: Tensor) -> Tensor:
        """The probabilities (N, C) of logits."""
        return outputs.softmax(1)


class GraphTensors(GraphAnswers):
    """x f32 (N, 3, H, W) -> the outputs of the graph that its task is about: one tensor, or a tuple of them all."""

    def __init__(
        self, network: StepNetwork, head: GraphHead, decoder: RawOutputs, one_by_one: bool = False
    ) -> None:
        super().__init__(network, head, one_by_one)
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.decoder.answer(self.answer(x))

    def decode(self, outputs: Any) -> Any:
        """The outputs as they are."""
        return outputs


GraphModel = GraphDetector | GraphClassifier | GraphTensors


def build_model(
    graph: Graph,
    decoder: str,
    task: str,
    classes: Sequence[str],
    where: str | Path,
    device: str | torch.device = "cpu",
) -> GraphModel:
    """The model of a query with the graph's weights; on the device "meta", or from a graph without weights, with none.

    Raises InputError when no decoder fits, or the classes do not.
    """
    from gemel.models.graph import build_graph

    head = head_of(graph)
    reader = choose_reader(head, decoder, task, classes, where)
    network = build_graph(graph.document, device)
    if graph.state and torch.device(device).type != "meta":
        network.load_state_dict(graph.state)
    one_by_one = graph.input.shape[0] != BATCH or any(
        output.axis is None for output in head.outputs
    )
    model: GraphModel
    if isinstance(reader, RawOutputs):
        model = GraphTensors(network, head, reader, one_by_one)
    elif isinstance(reader, GraphLogits):
        model = GraphClassifier(network, head, reader, one_by_one)
    else:
        model = GraphDetector(network, head, reader, one_by_one)
    model.source = replace(graph, state={})
    return model


def last_layers(network: StepNetwork) -> tuple[str, ...]:
    """Paths of the convolutions and linear layers that no other one follows.

    One that reads probabilities, such as the mean of YOLOv8's distances to a box's sides, counts as none.
    """
    steps = network.list_steps()
    paths: dict[str, None] = {}
    followed: set[int] = set()
    for number, step in reversed(list(enumerate(steps, 1))):
        is_layer = (
            step.kind is StepKind.MODULE
            and isinstance(network.get_submodule(step.name), LAYER_TYPES)
            and source_operator(steps, step) != "Softmax"
        )
        if is_layer and number not in followed:
            paths[step.name] = None
        if is_layer or number in followed:
            followed.update(step.sources)
    return tuple(reversed(paths))


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
