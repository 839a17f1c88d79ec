"""What must hold between a bundle's manifest, its tensors and the architectures it names; one line a problem."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from models.bits import STORED_CODES, WIDE_CODE, max_code, stored_shape
from models.bundle.format import ALIGNMENT_BYTES, ITEM_BYTES, Entry, Header
from models.bundle.manifest import (
    BundleQuery,
    Manifest,
    StoredTensor,
    count_bytes,
    original_bytes,
    shared_of,
    wide_code,
    wide_shape,
)
from models.bundle.model_spec import ModelSpec
from models.bundle.writer import load_order

MAX_FP32 = float(np.finfo(np.float32).max)
"""A scale above this over the largest code would unpack a code to infinity."""
_CHUNK_BYTES = 1 << 22
_EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""The exponent bits that are all set in infinity and NaN."""
_READ_AS = {
    "F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "u1",
}  # fmt: skip


def layout_problems(header: Header) -> Iterator[str]:
    """Names, alignment and gap fillers."""
    if header.data_start % ALIGNMENT_BYTES:
        yield f"the data section starts at byte {header.data_start}, not at a multiple of {ALIGNMENT_BYTES}"
    pads = 0
    for name, entry in header.entries.items():
        if entry.is_pad:
            expected = (f"pad.{pads}", "U8", (entry.nbytes,))
            if (name, entry.dtype, entry.shape) != expected or entry.nbytes >= ALIGNMENT_BYTES:
                yield f"tensor {name[:80]!r} is no valid gap filler"
            pads += 1
        elif len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            yield f"tensor {name[:80]!r} is not named by its content"
        elif entry.begin % ALIGNMENT_BYTES:
            yield f"tensor {name} starts at byte {entry.begin}, not at a multiple of {ALIGNMENT_BYTES}"


def manifest_problems(manifest: Manifest, header: Header) -> Iterator[str]:
    """What the manifest says about tensors and the header contradicts."""
    entries = {name: entry for name, entry in header.entries.items() if not entry.is_pad}
    is_complete = True
    for query in manifest.queries:
        for path, name in query.places().items():
            if name not in entries:
                is_complete = False
                yield f"query {query.id}: tensor {name} of {path} is missing"
    if not is_complete:
        return
    for query in manifest.queries:
        yield from _stored_problems(query, entries)
        if original_bytes(query, entries) == 0:
            yield f"query {query.id}: its tensors hold nothing"
    for name in entries.keys() - set(load_order(manifest.queries)):
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


def order_problems(manifest: Manifest, header: Header) -> Iterator[str]:
    """Each sharing set and each query's private tensors must be contiguous, or a load is many small copies."""
    users: dict[str, set[str]] = {}
    for query in manifest.queries:
        for name in query.places().values():
            users.setdefault(name, set()).add(query.id)
    done: set[frozenset[str]] = set()
    current: frozenset[str] = frozenset()
    for name in header.entries:
        queries = frozenset(users.get(name, ()))
        if not queries or queries == current:
            continue
        if queries in done:
            yield f"the tensors of {', '.join(sorted(queries)[:5])} do not lie together, from {name} on"
            return
        done.add(queries)
        current = queries


def architecture_problems(query: BundleQuery, spec: ModelSpec, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Paths, shapes and dtypes that do not fit the architecture."""
    where = f"query {query.id}"
    for path in spec.tensors.keys() - query.tensors.keys():
        yield f"{where}: {query.model} needs {path}, which the bundle does not have"
    for path in query.tensors.keys() - spec.tensors.keys():
        yield f"{where}: {query.model} has no {path}"
    for path in query.tensors.keys() & spec.tensors.keys():
        entry, (dtype, shape) = entries[query.tensors[path]], spec.tensors[path]
        if (found := wide_shape(query, path, entry)) != shape:
            yield f"{where}: {path} has shape {found}, {query.model} needs {shape}"
        elif wide_code(query, path, entry) != dtype:
            yield f"{where}: {path} has dtype {entry.dtype}, {query.model} needs {dtype}"


def _stored_problems(query: BundleQuery, entries: Mapping[str, Entry]) -> Iterator[str]:
    """What `stored` says and the header contradicts; `scale_problems` checks the values of scales."""
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


def value_problems(entry: Entry, stored: Collection[StoredTensor], data: memoryview) -> Iterator[str]:
    """Values that no tensor of a bundle has: NaN, infinities, a BOOL beside 0 and 1, codes that packing never gives.

    `data` are its bytes; `stored` are the ways in which queries use it packed.
    """
    where, item = f"tensor {entry.name[:80]}", ITEM_BYTES[entry.dtype]
    lowest = -max_code("int8")
    for at in range(0, entry.nbytes, _CHUNK_BYTES):
        values = np.frombuffer(data, _READ_AS[entry.dtype], min(_CHUNK_BYTES, entry.nbytes - at) // item, at)
        exponent = _EXPONENTS.get(entry.dtype)
        if exponent is not None and bool(((values & exponent) == exponent).any()):
            yield f"{where} holds NaN or infinite values"
            return
        if entry.dtype == "BOOL" and bool((values > 1).any()):
            yield f"{where} holds bytes that are neither true nor false"
            return
        if stored and entry.dtype == "I8" and bool((values < lowest).any()):
            yield f"{where} holds the code {lowest - 1}; the lowest is {lowest}"
            return
    for packed in stored:
        if packed.shape is not None and _has_invalid_nibbles(packed.shape, entry, data):
            yield f"{where} holds, as {packed.dtype}, a code or padding that no weight has"


def _has_invalid_nibbles(shape: tuple[int, ...], entry: Entry, data: memoryview) -> bool:
    """Whether a code is 15, which packing never gives, or the last half byte of a row of odd length is not 0."""
    rows = np.frombuffer(data, np.uint8).reshape(entry.shape)
    is_odd = int(np.prod(shape[1:], dtype=np.int64)) % 2 == 1
    step = max(1, _CHUNK_BYTES // max(entry.shape[1], 1))
    for at in range(0, len(rows), step):
        chunk = rows[at : at + step]
        if bool((chunk & 15 == 15).any()) or bool((chunk >> 4 == 15).any()):
            return True
        if is_odd and bool((chunk[:, -1] >> 4).any()):
            return True
    return False


def scale_problems(manifest: Manifest, header: Header, content: memoryview | mmap.mmap) -> Iterator[str]:
    """Scales that are not finite and above zero; `content` is the file, and `manifest_problems` found nothing."""
    seen: set[str] = set()
    for query in manifest.queries:
        for key, packed in query.stored.items():
            if packed.scale is None or packed.scale in seen:
                continue
            seen.add(packed.scale)
            entry = header.entries[packed.scale]
            count = entry.nbytes // ITEM_BYTES[WIDE_CODE]
            values = np.frombuffer(content, "<f4", count, header.data_start + entry.begin)
            if not bool(np.all((values > 0) & (values <= MAX_FP32 / max_code(packed.dtype)))):
                yield f"query {query.id}: the scale of {key} is not above zero and finite in every channel"
