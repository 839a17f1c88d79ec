"""The networks that a bundle holds: ONNX documents without weights, and which tensors they refer to. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gemel.models.bundle.format import Entry
from gemel.models.bundle.manifest import BundleQuery, wide_code, wide_shape
from gemel.models.errors import InputError

if TYPE_CHECKING:
    import onnx

WEIGHTS_FILE = "weights.bin"
"""The location of the external data by which a document refers to a bundle's tensors."""
NETWORK_PREFIX = "network."
"""Begins the state dict keys of a network that came as a graph; its document leaves it out."""


def parse_document(query: BundleQuery, document: bytes) -> onnx.ModelProto:
    """The ONNX model of a query's document, past the gate; its weights keep their names, other values get numbers.

    Raises ValueError for what the gate refuses.
    """
    from gemel.models.graph.gate import GraphKind, admit_graph

    try:
        gated = admit_graph(
            document, f"query {query.id}: its document", GraphKind.DOCUMENT, keep_ends=True
        )
    except InputError as error:
        raise ValueError(error.problem) from error
    for key, text in gated.metadata.items():
        gated.model.metadata_props.add(key=key, value=text)
    return gated.model


def refers_to_weights(tensor: onnx.TensorProto) -> bool:
    """Whether an initialiser of a document has its values in the bundle."""
    return any(
        entry.key == "location" and entry.value == WEIGHTS_FILE for entry in tensor.external_data
    )


def key_of_weight(query: BundleQuery, name: str) -> str:
    """The state dict key of the tensor that a document's initialiser of this name refers to."""
    return name if query.graph is None else f"{NETWORK_PREFIX}{name}"


class DocumentWeight(NamedTuple):
    """A tensor that a document takes from its bundle; `data_type` is TensorProto's."""

    name: str
    shape: tuple[int, ...]
    data_type: int


_WEIGHTS: dict[bytes, tuple[DocumentWeight, ...]] = {}
"""Of documents that passed the gate, by their digests: queries of one network have one document."""


def weights_of_document(query: BundleQuery, document: bytes) -> tuple[DocumentWeight, ...]:
    """What a query's document takes from its bundle; ValueError for what the gate refuses."""
    digest = hashlib.sha256(document).digest()
    if digest not in _WEIGHTS:
        _WEIGHTS[digest] = tuple(
            DocumentWeight(tensor.name, tuple(tensor.dims), tensor.data_type)
            for tensor in parse_document(query, document).graph.initializer
            if refers_to_weights(tensor)
        )
    return _WEIGHTS[digest]


def document_problems(
    query: BundleQuery, document: bytes, entries: Mapping[str, Entry]
) -> Iterator[str]:
    """What in the document of a query does not fit its tensors.

    Of a network that came as a graph a matrix may lie transposed in the bundle, as a state dict has it.
    """
    import onnx

    where = f"query {query.id}: its document"

    try:
        weights = weights_of_document(query, document)
    except ValueError as error:
        yield f"{where} {error}"
        return
    for weight in weights:
        key = key_of_weight(query, weight.name)
        if key not in query.tensors:
            yield f"{where} needs {key[:200]}, which the bundle does not have"
            continue
        entry = entries[query.tensors[key]]
        shape = wide_shape(query, key, entry)
        code = wide_code(query, key, entry)
        shapes = {shape} if query.graph is None else {shape, shape[::-1]}
        if weight.shape not in shapes or weight.data_type != _TYPES_BY_CODE.get(code):
            dtype = onnx.TensorProto.DataType.Name(weight.data_type)
            yield f"{where} takes {key} as {dtype} {weight.shape}, the bundle has {code} {shape}"


_TYPES_BY_CODE = {
    "F32": 1, "U8": 2, "I8": 3, "I16": 5, "I32": 6, "I64": 7, "BOOL": 9, "F16": 10, "F64": 11, "BF16": 16,
}  # fmt: skip
"""TensorProto's data types by dtype code."""
