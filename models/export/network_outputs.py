"""What the outputs of a query's network mean, by its document and its record in a bundle: no architecture is built.

Needs no torch; ONNX only where a document is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from gemel.models.bundle.manifest import BundleQuery
from gemel.models.decoders import AUTO
from gemel.models.decoders.decoder import GraphHead
from gemel.models.decoders.heads import BATCH, head_of
from gemel.models.decoders.readers import GraphReader, choose_reader
from gemel.models.errors import InputError
from gemel.models.objects.candidates import (
    MAX_CANDIDATES,
    BoxReader,
    DecodedReader,
    SuppressedReader,
)
from gemel.models.predictions import Prediction
from gemel.models.tasks import task_of

OUTPUTS_KEY = "gemel.outputs"
"""The metadata key of what outputs are: JSON of `kind`, and of a detector `nms_iou`, `most_candidates`."""
LOGITS, CANDIDATES, SUPPRESSED = "logits", "candidates", "suppressed"
"""Kinds of outputs: of a classifier or segmenter; boxes and scores before suppression; boxes, scores and labels."""


@dataclass(frozen=True)
class NetworkOutputs:
    """What a document says of its outputs.

    A network that was exported here says their `kind` and, of a detector, `nms_iou` and `most_candidates` as
    models.objects.candidates has them; one that came as a graph has a `head` that a decoder reads. `is_single`: it
    takes one frame at a time.
    """

    is_single: bool
    kind: Literal["logits", "candidates", "suppressed"] = LOGITS
    nms_iou: Annotated[float, Field(ge=0, le=1)] | None = None
    most_candidates: Annotated[int, Field(ge=1, le=1 << 20)] = MAX_CANDIDATES
    head: GraphHead | None = None


_OUTPUTS = TypeAdapter(dict[str, Any])
_DESCRIPTION = TypeAdapter(NetworkOutputs)


def describe_outputs(query: BundleQuery, document: bytes) -> NetworkOutputs:
    """What the document of a query says of its outputs; InputError for one that says nothing sound."""
    if query.graph is not None:
        return _describe_graph(document)
    import onnx

    model = onnx.load_from_string(document)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    frames = model.graph.input[0].type.tensor_type.shape.dim[0]
    try:
        values = _OUTPUTS.validate_json(metadata[OUTPUTS_KEY])
        values.pop("has_points", None)  # says itself by the number of outputs
        return _DESCRIPTION.validate_python({**values, "is_single": frames.dim_value == 1})
    except (KeyError, ValidationError) as error:
        problem = "does not say what its outputs are"
        raise InputError(f"the document of query {query.id}", problem, "merge again") from error


def _describe_graph(document: bytes) -> NetworkOutputs:
    from gemel.models.graph.stored import restore_graph

    graph = restore_graph(document)
    head = head_of(graph)
    if head.cut is not None:
        head = replace(head, cut=replace(head.cut, tail=b""))  # no decoder reads it
    is_single = graph.input.shape[0] != BATCH or any(output.axis is None for output in head.outputs)
    return NetworkOutputs(is_single, head=head)


def reader_of(query: BundleQuery, outputs: NetworkOutputs) -> GraphReader | BoxReader | None:
    """What reads a network's outputs; None for logits as they are. InputError as `OutputReader`."""
    if outputs.head is not None:
        decoder = query.decoder or AUTO
        return choose_reader(outputs.head, decoder, query.task, query.classes, f"query {query.id}")
    if outputs.kind == CANDIDATES:
        return DecodedReader(outputs.nms_iou, outputs.most_candidates)
    return SuppressedReader(outputs.nms_iou) if outputs.kind == SUPPRESSED else None


class OutputReader:
    """Reads what the network of a query gives: arrays as ONNX Runtime returns them become predictions.

    Raises InputError where no decoder fits the outputs of an imported network, or the query's classes do not.
    """

    def __init__(self, query: BundleQuery, outputs: NetworkOutputs) -> None:
        self.query = query
        self._described = outputs
        self._task = task_of(query)
        reader = reader_of(query, outputs)
        self._boxes = reader if isinstance(reader, BoxReader) else None
        self._graph = reader if isinstance(reader, GraphReader) else None

    @property
    def is_single(self) -> bool:
        """Whether the network takes one frame at a time."""
        return self._described.is_single

    def join(self, runs: Sequence[Sequence[np.ndarray]]) -> Any:
        """The outputs of one run, or of one for each frame, as the task reads them: one array, or a tuple of them.

        Rows are frames; floats are f32.
        """
        head = self._described.head
        outputs = []
        for place, parts in enumerate(zip(*runs, strict=True)):
            arrays = [_as_float32(part) for part in parts]
            if head is not None:
                arrays = [head.outputs[place].by_frame(array) for array in arrays]
            outputs.append(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        if self._graph is not None:
            return self._graph.answer(outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def predictions(
        self, outputs: Any, sizes: Sequence[tuple[int, int]], min_score: float = 0.0
    ) -> list[Prediction]:
        """What `join` gave as predictions, one a frame; places in pixels of frames of `sizes` (width, height)."""
        query = self.query
        return self._task.predictions(
            self._boxes, outputs, sizes, query.classes, min_score, query.preprocess
        )


def _as_float32(values: np.ndarray) -> np.ndarray:
    return (
        values.astype(np.float32, copy=False)
        if np.issubdtype(values.dtype, np.floating)
        else values
    )
