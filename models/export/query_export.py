"""Writes a query of a bundle as an ONNX file, from the document that the bundle holds. Needs no torch for that."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemel.models.bundle.query_documents import key_of_weight
from gemel.models.bundle.stored_arrays import BundleArrays
from gemel.models.errors import InputError, join_names
from gemel.models.export.onnx_file import BATCH_AXIS, DYNAMIC, OWN, Batch, ExportedModel, write_file
from gemel.models.files.extras import is_installed
from gemel.models.files.io import check_apart, check_output
from gemel.models.notes import add_note
from gemel.models.objects.candidates import BoxReader
from gemel.models.tasks import MIN_SCORE

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle, BundleQuery
    from gemel.models.export.network_outputs import NetworkOutputs
    from gemel.models.graph.proto_graph import ProtoGraph


def export_query(
    bundle: Bundle, query_id: str, path: str | Path, batch: Batch | None = None
) -> ExportedModel:
    """Write one query of a bundle with its own tensors; classes and preprocessing are in the metadata.

    Raises InputError for an unknown query, a batch that its network does not take, a path that cannot be written and a
    network that is too large for one file.
    """
    check_apart([("--out", path)], [("the bundle", bundle.path)])
    path = check_output(path)
    return write_file(query_graph(bundle, query_id, batch), path)


def query_graph(
    bundle: Bundle, query_id: str, batch: Batch | None = None, unfolded: Collection[str] = ()
) -> ProtoGraph:
    """The network of a query with its tensors, in float32, and its metadata.

    A graph that came as a file is that graph again; norms at the paths `unfolded` stay apart from their convolutions. A
    network that the bundle does not hold is traced, by torch.
    """
    from gemel.models.export.network_outputs import OUTPUTS_KEY, describe_outputs
    from gemel.models.graph.fill import fill_graph

    query = bundle.query(query_id)
    if query.stored:
        dtypes = join_names(sorted({stored.dtype for stored in query.stored.values()}))
        problem = f"query {query_id}: {len(query.stored)} weights stored in {dtypes} are written in float32"
        add_note(bundle.path, problem, "the bundle is smaller")
    if query.network_document is None and is_installed("torch"):
        from gemel.models.export.trace import trace_query

        graph, outputs = trace_query(bundle, query, batch)
    else:
        document = bundle.document_of(query_id)
        tensors = BundleArrays(bundle)
        outputs = describe_outputs(query, document)

        def array_of(name: str) -> np.ndarray:
            return tensors.wide_array(query, key_of_weight(query, name))

        axis = BATCH_AXIS if batch == DYNAMIC else batch
        try:
            graph = fill_graph(document, array_of, unfolded, query.graph is not None, axis)
        except InputError as error:
            problem = f"the graph of {query_id} {error.problem}"
            raise InputError(bundle.path, problem, error.hint, error.key) from error
        graph.metadata.pop(OUTPUTS_KEY, None)
    graph.metadata.update(metadata_of(query, outputs, bundle.digest))
    return graph


def metadata_of(query: BundleQuery, outputs: NetworkOutputs, digest: str) -> dict[str, str]:
    """What a reader needs besides the network, as metadata_props: JSON under keys `gemel.*`."""
    from gemel.models.export.network_outputs import reader_of

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
            "least_score": max(query.least_score, MIN_SCORE),
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
