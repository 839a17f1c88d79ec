"""Writes a bundle: equal tensors once, in load order, straight to the disk, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemel.models.bundle.checks import manifest_problems
from gemel.models.bundle.format import (
    Entry,
    code_of,
    encode_header,
    has_code,
    parse_head,
    place,
    raw_bytes,
    tensor_name,
)
from gemel.models.bundle.manifest import (
    FORMAT,
    GRAPH,
    MANIFEST_KEY,
    SCALE,
    BundleQuery,
    Manifest,
    StoredTensor,
    count_bytes,
    graph_names,
    parse_manifest,
    shared_of,
)
from gemel.models.errors import InputError
from gemel.models.files.documents import ParseError
from gemel.models.files.io import check_output, open_atomic

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gemel.models.bundle.reader import Bundle
    from gemel.models.quantization import PackedWeight


@dataclasses.dataclass(frozen=True)
class Made:
    """Where a bundle comes from: workload, method, and the bytes that sharing could save."""

    workload: str
    method: str
    ceiling_bytes: int


def write_bundle(
    path: str | Path,
    models: Mapping[str, nn.Module],
    queries: Sequence[BundleQuery],
    origin: Made,
    *,
    overwrite: bool = False,
    packed: Mapping[str, Mapping[str, PackedWeight]] | None = None,
    documents: Mapping[str, bytes] | None = None,
    holders: Mapping[str, Bundle] | None = None,
) -> Manifest:
    """Write the models of a workload as one bundle and return its manifest.

    `models` holds each query's module, tied; what is shared is found by content. `queries` are records without
    tensors (`BundleQuery.of`), in the order they shall have. The bytes before and after are counted here. `packed`
    maps queries and state dict keys to what is stored in place of the model's tensor; queries that share a weight
    should have the same one. `documents` are networks of queries as ONNX documents (`export_documents`). `holders` maps
    queries without a model here to the bundle that has the tensors of their records, which stay as they are; one tensor
    of these is in memory at a time. Raises InputError, with nothing written, when the path exists or cannot be written,
    the disk is full, or bytes of a holder are gone or no longer what they were, and ValueError when models and queries
    don't fit together.
    """
    path = check_output(path, overwrite)
    laid = _lay_out(path, models, queries, origin, packed or {}, documents or {}, holders or {})
    with open_atomic(path, overwrite) as file:
        file.write(laid.head)
        for entry in laid.entries:
            file.write(laid.content(entry))
    return laid.manifest


def check_writable(
    path: str | Path, models: Mapping[str, nn.Module], queries: Sequence[BundleQuery]
) -> None:
    """Raise InputError where `write_bundle` would not write these models; call it before they are trained."""
    _lay_out(Path(path), models, queries, Made("workload", "none", 0), {}, {}, {})


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A bundle before it is written; `tensors` are in memory, the others in the bundle that `holders` names."""

    manifest: Manifest
    head: bytes
    entries: Sequence[Entry]
    tensors: Mapping[str, Tensor]
    holders: Mapping[str, Bundle]

    def content(self, entry: Entry) -> bytes | memoryview:
        """The bytes of an entry."""
        if entry.is_pad:
            return bytes(entry.nbytes)
        if entry.name in self.tensors:
            return raw_bytes(self.tensors[entry.name])
        return _read(self.holders[entry.name], entry.name)


def _lay_out(
    path: Path,
    models: Mapping[str, nn.Module],
    queries: Sequence[BundleQuery],
    origin: Made,
    packed: Mapping[str, Mapping[str, PackedWeight]],
    documents: Mapping[str, bytes],
    holders: Mapping[str, Bundle],
) -> _Layout:
    ids = [*models, *holders]
    if len({query.id for query in queries}) < len(queries) or {
        query.id for query in queries
    } != set(ids):
        raise ValueError(
            f"models {sorted(ids)} and queries {[query.id for query in queries]} differ"
        )
    tensors: dict[str, Tensor] = {}
    homes: dict[str, Bundle] = {}
    names_by_content: dict[tuple[object, ...], str] = {}
    records = []
    for query in queries:
        if query.id in holders:
            homes |= dict.fromkeys(
                (*graph_names([query]), *query.places().values()), holders[query.id]
            )
            records.append(query)
            continue
        weights = packed.get(query.id, {})
        places = {}
        for key, tensor in _stored_state(models[query.id].state_dict(), weights).items():
            identity = _identity(tensor)
            if identity not in names_by_content:
                names_by_content[identity] = _name_of(tensor, f"query {query.id}: {key}")
            places[key] = names_by_content[identity]
            tensors.setdefault(names_by_content[identity], tensor)
        stored = {}
        for key, weight in weights.items():
            shape = weight.shape if weight.shape != weight.tensor.shape else None
            stored[key] = StoredTensor(weight.width, places.pop(f"{key}.{SCALE}", None), shape)
        record = dataclasses.replace(query, tensors=places, stored=stored, document=None)
        if query.model == GRAPH:
            document = _document_of(models[query.id])
            name = _name_of(document, f"query {query.id}: its graph")
            tensors[name] = document
            decoder = getattr(models[query.id], "decoder", None)
            record = dataclasses.replace(record, graph=name, decoder=getattr(decoder, "name", None))
        elif query.id in documents:
            document = _byte_tensor(documents[query.id])
            name = _name_of(document, f"query {query.id}: its document")
            tensors[name] = document
            record = dataclasses.replace(record, document=name)
        records.append(record)
    shapes = {
        name: (home.header.entries[name].dtype, home.header.entries[name].shape)
        for name, home in homes.items()
    }
    shapes |= {
        name: (code_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    entries = place((name, *shapes[name]) for name in load_order(records))
    by_name = {entry.name: entry for entry in entries if not entry.is_pad}
    counts = count_bytes(records, by_name, origin.ceiling_bytes)
    if counts.before < origin.ceiling_bytes and not holders:
        raise ValueError(f"{origin.ceiling_bytes} bytes cannot be saved: there are fewer")
    text = Manifest(
        FORMAT, origin.workload, origin.method, counts, tuple(records), shared_of(records)
    ).to_json()
    try:
        manifest = parse_manifest(text)
        head = encode_header(entries, {MANIFEST_KEY: text})
        for problem in manifest_problems(manifest, parse_head(head)):
            raise ParseError(problem)
    except ParseError as error:
        raise InputError(
            path, f"this bundle could not be read again: {error}", "change the workload"
        ) from None
    return _Layout(manifest, head, entries, tensors, homes)


def _document_of(model: nn.Module) -> Tensor:
    from gemel.models.graph.stored import store_graph

    return _byte_tensor(store_graph(model.source))  # type: ignore[arg-type]


def _byte_tensor(content: bytes) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _name_of(tensor: Tensor, where: str) -> str:
    if not has_code(tensor.dtype):
        problem = f"has the dtype {str(tensor.dtype).removeprefix('torch.')}, which no bundle holds"
        raise InputError(where, problem, "store it as float32 in the model")
    return tensor_name(code_of(tensor.dtype), tensor.shape, raw_bytes(tensor))


def write_substituted(
    path: str | Path,
    bundle: Bundle,
    replacements: Mapping[str, Bundle],
    overwrite: bool = False,
    workload: str = "",
) -> None:
    """Write the bundle with each of these queries as it is in another bundle; new ones come last.

    `workload` is its name, if it is another one.
    One tensor is in memory at a time. Raises InputError, with nothing written, where the path exists or cannot be
    written, or bytes of one of the bundles are gone or no longer what they were.
    """
    homes = {**{query.id: bundle for query in bundle.queries}, **replacements}
    queries = [home.query(query) for query, home in homes.items()]
    origin = Made(
        workload or bundle.manifest.workload, bundle.manifest.method, bundle.manifest.bytes.ceiling
    )
    write_bundle(path, {}, queries, origin, overwrite=overwrite, holders=homes)


def _read(bundle: Bundle, name: str) -> memoryview:
    try:
        return bundle.read_bytes(name)
    except OSError as error:
        raise InputError(
            bundle.path, str(error.strerror), "copy it again, under another name"
        ) from error


def load_order(queries: Sequence[BundleQuery]) -> tuple[str, ...]:
    """Tensor names in file order: graphs, each sharing set together, then each query's private tensors.

    A sharing set is all tensors used by the same two or more queries; the sets of most queries come first, and within
    a set or a query the tensors follow layer by layer.
    """
    users: dict[str, list[int]] = {}
    for index, query in enumerate(queries):
        for name in query.places().values():
            indices = users.setdefault(name, [])
            if index not in indices:
                indices.append(index)
    first_use = {name: at for at, name in enumerate(users)}

    def rank(name: str) -> tuple[bool, int, list[int], int]:
        indices = users[name]
        return len(indices) == 1, -len(indices), indices, first_use[name]

    return (*graph_names(queries), *sorted(users, key=rank))


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory read the same way: tied tensors are hashed once."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _stored_state(
    state: Mapping[str, Tensor], packed: Mapping[str, PackedWeight]
) -> dict[str, Tensor]:
    """The state with packed tensors in place of float32 ones and their scales beside them."""
    stored: dict[str, Tensor] = {}
    for key, tensor in state.items():
        weight = packed.get(key)
        stored[key] = tensor if weight is None else weight.tensor
        if weight is not None and weight.shape != tensor.shape:
            raise ValueError(
                f"{key} has shape {tuple(tensor.shape)}, its packed tensor {weight.shape}"
            )
        if weight is not None and weight.scale is not None:
            stored[f"{key}.{SCALE}"] = weight.scale
    if unknown := packed.keys() - state.keys():
        raise ValueError(f"the model has no {sorted(unknown)[0]} that could be packed")
    return stored
