"""What must hold between a bundle's manifest, its tensors and the architectures it names; each fault is
one line.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from models.bits import BIT_WIDTHS, BYTE, STORED_CODES, WIDE_CODE, Bits, max_code, residual_shapes, stored_shape
from models.bundle.format import ALIGNMENT_BYTES, ITEM_BYTES, Entry, Header
from models.bundle.manifest import (
    RESIDUAL_A,
    RESIDUAL_B,
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
"""A scale that is larger than this over the largest code would widen a code to infinity."""
_INFINITE = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits of an exponent that says infinite or no number."""
_CHUNK_BYTES = 1 << 22
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
            wanted = (f"pad.{pads}", "U8", (entry.nbytes,))
            if (name, entry.dtype, entry.shape) != wanted or entry.nbytes >= ALIGNMENT_BYTES:
                yield f"tensor {name[:80]!r} is no proper gap filler"
            pads += 1
        elif len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            yield f"tensor {name[:80]!r} is not named by its content"
        elif entry.begin % ALIGNMENT_BYTES:
            yield f"tensor {name} starts at byte {entry.begin}, not at a multiple of {ALIGNMENT_BYTES}"


def manifest_problems(manifest: Manifest, header: Header) -> Iterator[str]:
    """What the manifest says about tensors that the header does not bear out."""
    entries = {name: entry for name, entry in header.entries.items() if not entry.is_pad}
    missing = False
    for query in manifest.queries:
        for path, name in query.places().items():
            if name not in entries:
                missing = True
                yield f"query {query.id}: tensor {name} of {path} is missing"
    if missing:
        return
    for query in manifest.queries:
        yield from _residual_problems(query, entries)
        yield from _stored_problems(query, entries)
    for name in entries.keys() - set(load_order(manifest.queries)):
        yield f"tensor {name} belongs to no query"
    shared = shared_of(manifest.queries)
    if len(manifest.shared) != len(shared) or set(manifest.shared) != set(shared):
        yield "`shared` does not list exactly the tensors that stand at two or more places"
    for query in manifest.queries:
        if original_bytes(query, entries) == 0:
            yield f"query {query.id}: its tensors hold nothing"
    counted = count_bytes(manifest.queries, entries, manifest.bytes.ceiling)
    if manifest.bytes != counted:
        claimed = f"{manifest.bytes.before} before and {manifest.bytes.after} after"
        yield f"`bytes` claims {claimed}; the originals have {counted.before}, the tensors {counted.after}"
    if manifest.bytes.ceiling > counted.before:
        yield f"`bytes` claims that {manifest.bytes.ceiling} of {counted.before} bytes could be saved"


def order_problems(manifest: Manifest, header: Header) -> Iterator[str]:
    """Each sharing set and each query's private tensors must lie in one piece, or a load is many small
    copies.
    """
    users: dict[str, set[str]] = {}
    for query in manifest.queries:
        for name in query.places().values():
            users.setdefault(name, set()).add(query.id)
    done: set[frozenset[str]] = set()
    current: frozenset[str] = frozenset()
    for name in header.entries:
        who = frozenset(users.get(name, ()))
        if not who or who == current:
            continue
        if who in done:
            yield f"the tensors of {', '.join(sorted(who)[:5])} do not lie together, from {name} on"
            return
        done.add(who)
        current = who


def architecture_problems(query: BundleQuery, wanted: ModelSpec, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Paths, shapes, dtypes and residuals that do not fit the architecture."""
    where = f"query {query.id}"
    for path in wanted.tensors.keys() - query.tensors.keys():
        yield f"{where}: {query.model} needs {path}, which the bundle does not have"
    for path in query.tensors.keys() - wanted.tensors.keys():
        yield f"{where}: {query.model} has no {path}"
    for path in query.tensors.keys() & wanted.tensors.keys():
        entry, (dtype, shape) = entries[query.tensors[path]], wanted.tensors[path]
        if (own := wide_shape(query, path, entry)) != shape:
            yield f"{where}: {path} has shape {own}, {query.model} needs {shape}"
        elif wide_code(query, path, entry) != dtype:
            yield f"{where}: {path} has dtype {entry.dtype}, {query.model} needs {dtype}"
    for path, residual in query.residuals.items():
        if path not in wanted.layers:
            yield f"{where}: {path} is no layer that can carry a residual"
            continue
        try:
            residual_shapes(wanted.tensors[f"{path}.weight"][1], wanted.layers[path], residual.rank)
        except ValueError as error:
            yield f"{where}: {path}: {error}"


def _residual_problems(query: BundleQuery, entries: Mapping[str, Entry]) -> Iterator[str]:
    for layer, residual in query.residuals.items():
        where = f"query {query.id}: the residual of {layer}"
        weight = entries.get(query.tensors.get(f"{layer}.weight", ""))
        shape = None if weight is None else wide_shape(query, f"{layer}.weight", weight)
        if weight is None or shape is None or len(shape) not in (2, 4):
            yield f"{where} stands beside no weight of a convolution or linear layer"
            continue
        keys = {
            f"{layer}.{RESIDUAL_A}": entries[residual.a], f"{layer}.{RESIDUAL_B}": entries[residual.b],
            f"{layer}.weight": weight,
        }  # fmt: skip
        a, b, _ = (wide_shape(query, key, entry) for key, entry in keys.items())
        out, inner, rank = shape[0], shape[1:], residual.rank
        if a != (rank, *inner) or b != (out, rank, *(1,) * (len(inner) - 1)):
            yield f"{where}: a {a} and b {b} do not fit rank {rank} and weight {shape}"
        if len({wide_code(query, key, entry) for key, entry in keys.items()}) > 1:
            yield f"{where} has another dtype than the weight"


def _stored_problems(query: BundleQuery, entries: Mapping[str, Entry]) -> Iterator[str]:
    """What `stored` says and the header does not bear out; the values of scales are `scale_problems`."""
    state = query.state()
    for key, own in query.stored.items():
        where = f"query {query.id}: {key}, stored as {own.dtype},"
        if key not in state:
            yield f"query {query.id}: `stored` names {key}, which stands in neither `tensors` nor `residuals`"
            continue
        entry = entries[state[key]]
        if entry.dtype != STORED_CODES[own.dtype]:
            yield f"{where} has a tensor of dtype {entry.dtype}"
        if (BIT_WIDTHS[own.dtype] < BYTE) != (own.shape is not None):
            yield f"{where} names {'no shape' if own.shape is None else 'a shape, which it has no use for'}"
            continue
        shape = wide_shape(query, key, entry)
        if shape and entry.shape != stored_shape(own.dtype, shape):
            yield f"{where} has a tensor of shape {entry.shape} for a weight of shape {shape}"
        if (own.dtype != "fp16") != (own.scale is not None):
            yield f"{where} names {'no scale' if own.scale is None else 'a scale, which it has no use for'}"
        elif own.scale is not None:
            scale = entries[own.scale]
            if (scale.dtype, scale.shape) != (WIDE_CODE, shape[:1]) or not shape:
                yield f"{where} has a scale {scale.dtype} {scale.shape} for a tensor of shape {shape}"


def value_problems(entry: Entry, stored: Collection[StoredTensor], data: memoryview) -> Iterator[str]:
    """Values that no tensor of a bundle has: what is not finite, a BOOL beside 0 and 1, a code that no weight gets.

    `data` are its bytes; `stored` says as what it is packed.
    """
    where, item = f"tensor {entry.name[:80]}", ITEM_BYTES[entry.dtype]
    least = -max_code("int8")
    for at in range(0, entry.nbytes, _CHUNK_BYTES):
        values = np.frombuffer(data, _READ_AS[entry.dtype], min(_CHUNK_BYTES, entry.nbytes - at) // item, at)
        if entry.dtype in _INFINITE and bool(((values & _INFINITE[entry.dtype]) == _INFINITE[entry.dtype]).any()):
            yield f"{where} holds NaN or infinite values"
            return
        if entry.dtype == "BOOL" and bool((values > 1).any()):
            yield f"{where} holds bytes that are neither true nor false"
            return
        if stored and entry.dtype == "I8" and bool((values < least).any()):
            yield f"{where} holds the code {least - 1}; the least is {least}"
            return
    for own in stored:
        if own.shape is not None and _holds_other_bits(own.dtype, math.prod(own.shape[1:]), entry, data):
            yield f"{where} holds, as {own.dtype}, a code or padding that no weight has"


def _holds_other_bits(width: Bits, count: int, entry: Entry, data: memoryview) -> bool:
    """Whether a row of `count` codes holds one with all bits set, the only one that no weight has, or bits after it."""
    rows, bits = np.frombuffer(data, np.uint8).reshape(entry.shape), BIT_WIDTHS[width]
    at_once = max(1, _CHUNK_BYTES // BYTE // max(entry.shape[1], 1))
    for at in range(0, len(rows), at_once):
        found = np.unpackbits(rows[at : at + at_once], axis=1, bitorder="little")
        codes = found[:, : count * bits].reshape(-1, bits)
        if bool(codes.all(1).any()) or bool(found[:, count * bits :].any()):
            return True
    return False


def scale_problems(manifest: Manifest, header: Header, content: memoryview | mmap.mmap) -> Iterator[str]:
    """Scales whose values cannot be; `content` is the file, and everything above must hold."""
    seen: set[str] = set()
    for query in manifest.queries:
        for key, own in query.stored.items():
            if own.scale is None or own.scale in seen:
                continue
            seen.add(own.scale)
            entry = header.entries[own.scale]
            values = np.frombuffer(
                content, "<f4", entry.nbytes // ITEM_BYTES[WIDE_CODE], header.data_start + entry.begin
            )
            if not bool(np.all((values > 0) & (values <= MAX_FP32 / max_code(own.dtype)))):
                yield f"query {query.id}: the scale of {key} is not above zero and finite in every channel"
