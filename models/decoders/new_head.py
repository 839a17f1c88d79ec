"""A graph for other classes: the rows of its last layers that answer for classes are made new, everything else stays.

Which rows these are is measured: the scores of one class change with its own rows alone. So a layout that is not
understood is found out before anything trains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from gemel.models.decoders import choose_decoder, known_names
from gemel.models.decoders.classifier import Classifier
from gemel.models.decoders.decoder import Decoder
from gemel.models.decoders.graph_model import GraphAnswers, last_layers
from gemel.models.decoders.heads import head_of
from gemel.models.errors import InputError, join_names
from gemel.models.graph import Graph, TensorInfo, build_graph, load_graph
from gemel.models.graph.proto_graph import ProtoGraph
from gemel.models.graph.steps import StepNetwork
from gemel.models.graph.stored import transposed_weights
from gemel.models.labels.class_names import KEYS
from gemel.models.notes import add_note
from gemel.models.preprocess import height_width
from gemel.models.zoo import naming

if TYPE_CHECKING:
    from gemel.models.workload import Query

FIRST_SPREAD = 0.01
"""Deviation of new weights."""
BOX_COLUMNS = (0, 1, 4, 5)
"""Columns that a row may have beside its classes, whatever layers make them: a box, an objectness, a background."""


@dataclass(frozen=True)
class ClassRows:
    """The first row of each run of class rows in a layer; a run has one row for each class, in order."""

    starts: tuple[int, ...]


def make_head(
    graph: Graph, classes: Sequence[str], decoder: str, task: str, where: str | Path
) -> Graph:
    """The graph with an answer for each of these classes; rows of classes that it had under the same name are kept.

    Raises InputError where the rows of its classes cannot be told from the others.
    """
    head = head_of(graph)
    chosen = choose_decoder(decoder, head, task, None, where)
    former_names = known_names(chosen, graph.metadata) or ()
    names = json.dumps(dict(enumerate(classes)))
    metadata = {key: text for key, text in graph.metadata.items() if key not in KEYS} | {
        "names": names
    }
    if tuple(former_names) == tuple(classes):
        return replace(graph, metadata=metadata)
    try:
        rows = find_class_rows(graph, chosen)
        widened = _widen(
            graph,
            rows,
            chosen.width,
            [former_names.index(name) if name in former_names else None for name in classes],
        )
        widened = replace(
            widened, metadata=metadata, cut=graph.cut and replace(graph.cut, tail=b"")
        )
        _check(graph, widened, chosen, rows, len(classes), where)
    except _Unclear as error:
        problem = f"its head cannot be made new for {len(classes)} classes: {error}"
        raise InputError(
            where, problem, f"give its own {chosen.width} classes, or export it with these", "init"
        ) from error
    shared = [name for name in classes if name in former_names]
    text = f"its {chosen.width} classes give way to {len(classes)}; {join_names(shared) if shared else 'none'} kept"
    add_note(where, text, "expected for other classes; rows of the same name are kept")
    if graph.cut is not None and graph.cut.tail:
        text = f"what follows its {graph.cut.operator} is made for {chosen.width} classes and is left out"
        add_note(
            where,
            f"{text}: the trained file answers with candidates",
            "suppress or select them where it runs",
        )
    return widened


def start_graph(query: Query) -> Graph:
    """The graph that a query's training starts from: that of the file `init`, its head made for the query's classes."""
    assert isinstance(query.init, Path)
    size = None if query.input_size is None else height_width(query.input_size)
    with naming(query):
        return make_head(
            load_graph(query.init, size), query.classes, query.decoder, query.task, query.init
        )


def trained_graph(model: nn.Module, start: Graph) -> Graph:
    """The graph of an imported model with the weights that it has now, and the metadata of what it started from."""
    assert isinstance(model, GraphAnswers)
    return replace(model.source, state=dict(model.network.state_dict()), metadata=start.metadata)


class _Unclear(Exception):
    """Why a head is not understood."""


def find_class_rows(graph: Graph, decoder: Decoder) -> dict[str, ClassRows]:
    """The class rows of each last layer that has some, by the layer's path."""
    shifts, scores = _shifted_scores(graph, decoder)
    positive = {
        path: torch.zeros(len(shift), scores.shape[-1], dtype=torch.bool)
        for path, shift in shifts.items()
    }
    for label in range(scores.shape[-1]):
        total = scores[..., label].sum()
        slopes = torch.autograd.grad(
            total, list(shifts.values()), retain_graph=True, allow_unused=True
        )
        for path, slope in zip(shifts, slopes, strict=True):
            if slope is not None:
                positive[path][:, label] = slope > 0
    rows_by_layer = {}
    for path, rises in positive.items():
        labels = torch.where(rises.sum(dim=1) == 1, rises.int().argmax(dim=1), -1).tolist()
        if any(label >= 0 for label in labels):
            rows_by_layer[path] = ClassRows(_runs(path, labels, scores.shape[-1]))
    if not rows_by_layer:
        raise _Unclear("no row of its last layers answers for one class alone")
    is_single = decoder.has_objectness and scores.shape[-1] == 1 and len(rows_by_layer) > 1
    if (
        is_single
        and sum(len(rows.starts) for rows in rows_by_layer.values()) > len(rows_by_layer) // 2
    ):
        raise _Unclear("its only class cannot be told from its objectness")
    return rows_by_layer


def _runs(path: str, labels: Sequence[int], width: int) -> tuple[int, ...]:
    starts = [row for row, label in enumerate(labels) if label == 0]
    covered = [row for start in starts for row in range(start, start + width)]
    in_order = all(list(labels[start : start + width]) == list(range(width)) for start in starts)
    if not in_order or covered != [row for row, label in enumerate(labels) if label >= 0]:
        raise _Unclear(f"the rows of {path} are in no order of classes")
    return tuple(starts)


def _shifted_scores(graph: Graph, decoder: Decoder) -> tuple[dict[str, Tensor], Tensor]:
    """The rows of the last layers as variables, all 1, in place of what the layers compute, and the scores then."""
    network = build_graph(graph.document)
    network.load_state_dict(graph.state)
    shifts: dict[str, Tensor] = {}

    def shift(path: str):
        def hook(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
            rows = output.shape[-1] if isinstance(layer, nn.Linear) else output.shape[1]
            variable = shifts.setdefault(path, torch.ones(rows, requires_grad=True))
            variable = (
                variable
                if isinstance(layer, nn.Linear)
                else variable.view(-1, *[1] * (output.ndim - 2))
            )
            return torch.zeros_like(output) + variable

        return hook

    for path in last_layers(network):
        network.get_submodule(path).register_forward_hook(shift(path))
    return shifts, _scores(network, graph, decoder)[1]


def _scores(network: StepNetwork, graph: Graph, decoder: Decoder) -> tuple[Tensor | None, Tensor]:
    """Boxes (None of a classifier) and scores (..., C) of one frame of noise."""
    head = head_of(graph)
    frame = torch.rand(
        1, int(graph.input.shape[1]), *head.size, generator=torch.Generator().manual_seed(0)
    )
    outputs = GraphAnswers(network, head, one_by_one=True).answer(frame)
    if isinstance(decoder, Classifier):
        return None, decoder.logits(outputs).softmax(dim=1)
    boxes, scores = decoder.decode(outputs, head.size)[:2]
    return boxes, scores


def _widen(
    graph: Graph, rows: dict[str, ClassRows], width: int, sources: Sequence[int | None]
) -> Graph:
    """The graph with a run of `sources` in place of each run of `width` class rows; None makes a row new."""
    model = onnx.load_from_string(graph.document)
    state = dict(graph.state)
    draws = torch.Generator().manual_seed(0)
    last_rows = {
        len(graph.state[f"{path}.weight"])
        for path in last_layers(build_graph(graph.document, "meta"))
    }
    sizes = {width + extra: len(sources) + extra for extra in {*BOX_COLUMNS, *last_rows}}
    for path, layer_rows in rows.items():
        before = len(state[f"{path}.weight"])
        for name in (name for name in (f"{path}.weight", f"{path}.bias") if name in state):
            state[name] = _replace_rows(state[name], layer_rows.starts, width, sources, draws)
        runs = len(layer_rows.starts)
        extra = before - width * len(layer_rows.starts)
        sizes |= {
            before: len(state[f"{path}.weight"]),
            width + extra // runs: len(sources) + extra // runs,
        }
    _resize(model, graph.state, state)
    _renumber(model, rows, sizes)
    widened = replace(graph, document=model.SerializeToString(deterministic=True), state=state)
    return _describe_outputs(widened, model)


def _replace_rows(
    tensor: Tensor,
    starts: Sequence[int],
    width: int,
    sources: Sequence[int | None],
    draws: torch.Generator,
) -> Tensor:
    parts = []
    end = 0
    for start in starts:
        old = tensor[start : start + width]
        new = torch.randn(len(sources), *tensor.shape[1:], generator=draws) * FIRST_SPREAD
        if tensor.ndim == 1:
            new = old.mean().expand(len(sources)).clone()
        for row, source in enumerate(sources):
            if source is not None:
                new[row] = old[source]
        parts += [tensor[end:start], new]
        end = start + width
    return torch.cat([*parts, tensor[end:]])


def _resize(model: onnx.ModelProto, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Give the document's placeholders the shapes of the new weights."""
    transposed = transposed_weights(ProtoGraph(model))
    for value in model.graph.initializer:
        if value.name in after and before[value.name].shape != after[value.name].shape:
            shape = after[value.name].shape
            value.dims[:] = shape[::-1] if value.name in transposed else shape
            for entry in value.external_data:
                if entry.key == "length":
                    entry.value = str(after[value.name].nbytes)


def _renumber(model: onnx.ModelProto, rows: dict[str, ClassRows], sizes: dict[int, int]) -> None:
    """Replace sizes that follow the number of classes in what comes after the changed layers."""
    constants = {
        value.name: value
        for value in model.graph.initializer
        if value.data_type == onnx.TensorProto.INT64
    }
    after = {f"{path}.{name}" for path in rows for name in ("weight", "bias")}
    for node in model.graph.node:
        if not after.intersection(node.input):
            continue
        after.update(node.output)
        for attribute in node.attribute:
            if attribute.name == "split":
                attribute.ints[:] = [sizes.get(size, size) for size in attribute.ints]
        for place, name in enumerate(node.input):
            if name in constants and not constants[name].external_data:
                old = numpy_helper.to_array(constants[name])
                new = old.copy()
                for size, changed in sizes.items():
                    new[old == size] = changed
                if (new != old).any():
                    model.graph.initializer.append(
                        numpy_helper.from_array(new, f"{name}.of.{node.output[0]}")
                    )
                    node.input[place] = f"{name}.of.{node.output[0]}"


def _describe_outputs(graph: Graph, model: onnx.ModelProto) -> Graph:
    """The graph with the shapes that its outputs have now."""
    network = build_graph(graph.document)
    network.load_state_dict(graph.state)
    try:
        with torch.no_grad():
            outputs = network(torch.zeros(1, *(int(size) for size in graph.input.shape[1:])))
    except Exception as error:  # a size that was left or changed wrongly can fail in any operator
        text = " ".join(str(error).split())[:80]
        raise _Unclear(
            f"a size in its graph follows the classes in a way not known ({text})"
        ) from error
    infos = []
    for value, info, output in zip(model.graph.output, graph.outputs, outputs, strict=True):
        sizes = [_new_size(old, new) for old, new in zip(info.shape, output.shape, strict=True)]
        for dimension, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            if isinstance(size, int):
                dimension.dim_value = size
            else:
                dimension.dim_param = size
        infos.append(TensorInfo(info.name, info.dtype, tuple(sizes)))
    return replace(
        graph, document=model.SerializeToString(deterministic=True), outputs=tuple(infos)
    )


def _new_size(old: int | str, new: int) -> int | str:
    """A size of an output for one frame: "batch" and "4*batch" follow the batch still."""
    if isinstance(old, int):
        return new
    return old if old == "batch" else f"{new}*batch"


@torch.no_grad()
def _check(
    old: Graph,
    new: Graph,
    decoder: Decoder,
    rows: dict[str, ClassRows],
    width: int,
    where: str | Path,
) -> None:
    """Raise unless the new graph has the same boxes, and class rows where they were put."""
    changed = choose_decoder(decoder.name, head_of(new), decoder.task, width, where)
    if changed.width != width:
        raise _Unclear(f"it would answer with {changed.width}")
    boxes = []
    for graph, reader in ((old, decoder), (new, changed)):
        network = build_graph(graph.document)
        network.load_state_dict(graph.state)
        boxes.append(_scores(network, graph, reader)[0])
    # Boxes that changed would have been made by rows of classes.
    if boxes[0] is not None and not torch.allclose(boxes[0], boxes[1], rtol=1e-4, atol=1e-5):
        raise _Unclear("its boxes follow the classes")
    if width > 1 and decoder.width > 1:
        with torch.enable_grad():
            rows_found = find_class_rows(new, changed)
        runs = {path: len(layer_rows.starts) for path, layer_rows in rows_found.items()}
        if runs != {path: len(layer_rows.starts) for path, layer_rows in rows.items()}:
            raise _Unclear("the new rows do not answer for the classes")
