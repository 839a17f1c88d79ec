"""What must hold between a bundle's manifest, its tensors and the architectures it names; each fault is
one line.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping

import numpy as np

from models.bundle.container import ALIGNMENT_BYTES, Entry, Header
from models.bundle.counting import count_bytes, original_bytes, wide_code
from models.bundle.described import Described
from models.bundle.dtypes import ITEM_BYTES
from models.bundle.manifest import RESIDUAL_A, RESIDUAL_B, BundleQuery, Manifest, shared_of
from models.bundle.writer import load_order
from models.parts.terms import MOST, STORED_CODES, WIDE_CODE, residual_shapes

MOST_SCALE = float(np.finfo(np.float32).max) / MOST
"""A larger scale would widen a code to infinity."""
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


def architecture_problems(query: BundleQuery, wanted: Described, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Paths, shapes, dtypes and residuals that do not fit the architecture."""
    where = f"query {query.id}"
    for path in wanted.tensors.keys() - query.tensors.keys():
        yield f"{where}: {query.model} needs {path}, which the bundle does not have"
    for path in query.tensors.keys() - wanted.tensors.keys():
        yield f"{where}: {query.model} has no {path}"
    for path in query.tensors.keys() & wanted.tensors.keys():
        entry, (dtype, shape) = entries[query.tensors[path]], wanted.tensors[path]
        if entry.shape != shape:
            yield f"{where}: {path} has shape {entry.shape}, {query.model} needs {shape}"
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
        if weight is None or len(weight.shape) not in (2, 4):
            yield f"{where} stands beside no weight of a convolution or linear layer"
            continue
        a, b = entries[residual.a], entries[residual.b]
        out, *inner = weight.shape
        rank = residual.rank
        if a.shape != (rank, *inner) or b.shape != (out, rank, *(1,) * (len(inner) - 1)):
            yield f"{where}: a {a.shape} and b {b.shape} do not fit rank {rank} and weight {weight.shape}"
        keys = {f"{layer}.{RESIDUAL_A}": a, f"{layer}.{RESIDUAL_B}": b, f"{layer}.weight": weight}
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
        if (own.dtype == "int8") != (own.scale is not None):
            yield f"{where} names {'no scale' if own.scale is None else 'a scale, which it has no use for'}"
        elif own.scale is not None:
            scale = entries[own.scale]
            if (scale.dtype, scale.shape) != (WIDE_CODE, entry.shape[:1]) or not entry.shape:
                yield f"{where} has a scale {scale.dtype} {scale.shape} for a tensor of shape {entry.shape}"


def value_problems(entry: Entry, packed: bool, data: memoryview) -> Iterator[str]:
    """Values that no tensor of a bundle has: what is not finite, a BOOL beside 0 and 1, and -128 as a code of int8.

    `data` are its bytes; `packed` says how it is stored.
    """
    where, item = f"tensor {entry.name[:80]}", ITEM_BYTES[entry.dtype]
    for at in range(0, entry.nbytes, _CHUNK_BYTES):
        values = np.frombuffer(data, _READ_AS[entry.dtype], min(_CHUNK_BYTES, entry.nbytes - at) // item, at)
        if entry.dtype in _INFINITE and bool(((values & _INFINITE[entry.dtype]) == _INFINITE[entry.dtype]).any()):
            yield f"{where} holds NaN or infinite values"
            return
        if entry.dtype == "BOOL" and bool((values > 1).any()):
            yield f"{where} holds bytes that are neither true nor false"
            return
        if packed and entry.dtype == "I8" and bool((values == -MOST - 1).any()):
            yield f"{where} holds the code {-MOST - 1}; the least is {-MOST}"
            return


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
            if not bool(np.all((values > 0) & (values <= MOST_SCALE))):
                yield f"query {query.id}: the scale of {key} is not above zero and finite in every channel"
