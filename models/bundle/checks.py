"""What must hold between a bundle's manifest, its tensors and the architectures it names; one line a problem."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping

import numpy as np

from gemel.models.bits import STORED_CODES, WIDE_CODE, max_code, stored_shape
from gemel.models.bundle.format import ITEM_BYTES, Entry, Header
from gemel.models.bundle.manifest import (
    MAX_GRAPH_BYTES,
    BundleQuery,
    Manifest,
    count_bytes,
    graph_names,
    original_bytes,
    shared_of,
    wide_code,
    wide_shape,
)
from gemel.models.bundle.model_spec import ModelSpec

MAX_FP32 = float(np.finfo(np.float32).max)


def manifest_problems(manifest: Manifest, header: Header) -> list[str]:
    """Contradictions between the manifest and the header."""
    entries = {entry.name: entry for entry in header.tensors}
    missing = [
        f"query {query.id}: tensor {name} of {path} is missing"
        for query in manifest.queries
        for path, name in query.places().items()
        if name not in entries
    ]
    missing += [
        f"the graph {name} is missing"
        for name in graph_names(manifest.queries)
        if name not in entries
    ]
    return missing or list(_contradictions(manifest, entries))


def _contradictions(manifest: Manifest, entries: Mapping[str, Entry]) -> Iterator[str]:
    for query in manifest.queries:
        yield from _stored_problems(query, entries)
        if original_bytes(query, entries) == 0:
            yield f"query {query.id}: its tensors hold nothing"
    used = {name for query in manifest.queries for name in query.places().values()}
    for name in graph_names(manifest.queries):
        entry = entries[name]
        if (
            entry.dtype != "U8"
            or len(entry.shape) != 1
            or entry.nbytes > MAX_GRAPH_BYTES
            or name in used
        ):
            yield f"tensor {name} is no graph"
        used.add(name)
    for name in entries.keys() - used:
        yield f"tensor {name} belongs to no query"
    shared = shared_of(manifest.queries)
    if len(manifest.shared) != len(shared) or set(manifest.shared) != set(shared):
        yield "`shared` does not list exactly the tensors that are used at two or more places"
    counted = count_bytes(manifest.queries, entries, manifest.bytes.ceiling)
    if manifest.bytes != counted:
        claimed = f"{manifest.bytes.before} before and {manifest.bytes.after} after"
        yield f"`bytes` claims {claimed}; the originals have {counted.before}, the tensors {counted.after}"
    if manifest.bytes.ceiling > counted.before:
        yield f"`bytes` claims that {manifest.bytes.ceiling} of {counted.before} bytes could be saved"


def _stored_problems(query: BundleQuery, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Contradictions between `stored` and the header; `scale_problems` checks the values of scales."""
    for key, packed in query.stored.items():
        where = f"query {query.id}: {key}, stored as {packed.dtype},"
        if key not in query.tensors:
            yield f"query {query.id}: `stored` names {key}, which is not in `tensors`"
            continue
        entry = entries[query.tensors[key]]
        if entry.dtype != STORED_CODES[packed.dtype]:
            yield f"{where} has a tensor of dtype {entry.dtype}"
        if (packed.dtype == "int4") != (packed.shape is not None):
            yield f"{where} names {'no shape' if packed.shape is None else 'a shape, which only int4 has'}"
            continue
        shape = wide_shape(query, key, entry)
        if shape and entry.shape != stored_shape(packed.dtype, shape):
            yield f"{where} has a tensor of shape {entry.shape} for a weight of shape {shape}"
        if (packed.dtype != "fp16") != (packed.scale is not None):
            yield f"{where} names {'no scale' if packed.scale is None else 'a scale, which fp16 has not'}"
        elif packed.scale is not None:
            scale = entries[packed.scale]
            if (scale.dtype, scale.shape) != (WIDE_CODE, shape[:1]) or not shape:
                yield f"{where} has a scale {scale.dtype} {scale.shape} for a tensor of shape {shape}"


def scale_problems(
    manifest: Manifest, header: Header, content: memoryview | mmap.mmap
) -> Iterator[str]:
    """Scales that unpack some code to no finite number or to 0; `content` is the file, in which all tensors exist."""
    seen: set[str] = set()
    for query in manifest.queries:
        for key, packed in query.stored.items():
            if packed.scale is None or packed.scale in seen:
                continue
            seen.add(packed.scale)
            entry = header.entries[packed.scale]
            count = entry.nbytes // ITEM_BYTES[WIDE_CODE]
            values = np.frombuffer(content, "<f4", count, header.data_start + entry.begin)
            if not bool(np.all((values > 0) & (values <= MAX_FP32 / (max_code(packed.dtype) + 1)))):
                yield f"query {query.id}: the scale of {key} is not above zero and finite in every channel"


def architecture_problems(
    query: BundleQuery, spec: ModelSpec, entries: Mapping[str, Entry]
) -> Iterator[str]:
    """Paths, shapes and dtypes that do not fit the architecture."""
    where = f"query {query.id}"
    for path in spec.tensors.keys() - query.tensors.keys():
        yield f"{where}: {query.model} needs {path}, which the bundle does not have"
    for path in query.tensors.keys() - spec.tensors.keys():
        yield f"{where}: {query.model} has no {path}"
    for path in query.tensors.keys() & spec.tensors.keys():
        entry = entries[query.tensors[path]]
        dtype, shape = spec.tensors[path]
        if (shape_stored := wide_shape(query, path, entry)) != shape:
            yield f"{where}: {path} has shape {shape_stored}, {query.model} needs {shape}"
        elif wide_code(query, path, entry) != dtype:
            yield f"{where}: {path} has dtype {entry.dtype}, {query.model} needs {dtype}"
