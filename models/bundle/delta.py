"""Delta updates: the tensors that a box lacks of a new bundle, and the new header.

An update is a container like a bundle's: its tensors under their content names, a tensor `header` with the new bundle's
header (zlib), and the metadata key `gemel.update`, JSON with `format`, `old` and `new`, the SHA-256 of both files.
Applying an update gives the new bundle byte by byte, or fails without writing.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.bundle.format import (
    ALIGNMENT_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    Header,
    encode_header,
    load_json,
    parse_head,
    parse_header,
    place,
)
from models.bundle.reader import map_file, open_bundle
from models.errors import BundleError, InputError
from models.io import ParseError, check_apart, check_output, open_atomic

UPDATE_KEY, UPDATE_FORMAT = "gemel.update", 1
HEAD = "header"
_CHUNK_BYTES = 16 << 20
TensorBytes = Callable[[Entry], memoryview]


@dataclass(frozen=True, slots=True)
class Difference:
    """Size of an update: its `bytes`, its `tensors` of the bundle's `of_tensors`, and the whole bundle's bytes."""

    bytes: int
    tensors: int
    of_tensors: int
    bundle_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def write_update(old: str | Path, new: str | Path, out: str | Path | None) -> Difference:
    """Write what turns the bundle `old` into `new`, byte by byte, to `out`; None only counts it.

    Raises InputError, with nothing written, when a file cannot be read or written, and BundleError when one is no sound
    bundle.
    """
    if out is not None:
        check_apart([("--out", out)], [("the old bundle", old), ("the new bundle", new)])
        check_output(out)
    before, after = open_bundle(old), open_bundle(new)
    head = bytes(after.mapping[: after.header.data_start])
    packed_head = zlib.compress(head, 9)
    tensors = [one for one in after.header.entries.values() if not one.is_pad]
    missing = [one for one in tensors if one.name not in before.header.entries]
    sizes = [(one.name, one.dtype, one.shape, one.nbytes) for one in missing]
    entries = place([*sizes, (HEAD, "U8", (len(packed_head),), len(packed_head))])
    with memoryview(before.mapping) as old_view, memoryview(after.mapping) as new_view:

        def tensor_bytes(one: Entry) -> memoryview:
            if one.name in before.header.entries:
                return _slice(old_view, before.header, one)
            return _slice(new_view, after.header, one)

        if hashlib.sha256(new_view).hexdigest() != _write(head, after.header, tensor_bytes):
            problem = f"its tensors and those of {old} do not match their names"
            raise BundleError(after.path, problem, "check both with `gemel bundle verify`")
        info = {"format": UPDATE_FORMAT, "old": before.digest, "new": after.digest}
        own_head = encode_header(entries, {UPDATE_KEY: json.dumps(info)})
        if out is not None:
            with open_atomic(out) as file:
                file.write(own_head)
                for one in entries:
                    if one.is_pad:
                        file.write(bytes(one.nbytes))
                    else:
                        file.write(packed_head if one.name == HEAD else tensor_bytes(one))
    return Difference(len(own_head) + entries[-1].end, len(missing), len(tensors), len(after.mapping))


def apply_update(old: str | Path, update: str | Path, out: str | Path) -> dict[str, Any]:
    """Write to `out` the bundle that an update makes of `old`; returns its `bytes` and `digest`.

    `old` need not be the very file that the update was made from, as long as it has the tensors that are needed.
    Raises InputError, with nothing written, when a file cannot be read or written, when the update is none or does not
    fit `old`, and when the result is not the bundle that the update names.
    """
    check_apart([("--out", out)], [("the old bundle", old), ("the update", update)])
    check_output(out)
    before, path = open_bundle(old), Path(update)
    mapping = map_file(path)
    try:
        own = parse_header(mapping)
        info = _update_info(own)
        with memoryview(mapping) as update_view, memoryview(before.mapping) as old_view:
            head = _new_head(own, update_view)
            header = parse_head(head)

            def tensor_bytes(one: Entry) -> memoryview:
                for container, view in ((own, update_view), (before.header, old_view)):
                    if one.name in container.entries:
                        return _slice(view, container, one)
                problem = f"was not made for {old}, which lacks tensor {one.name[:12]}"
                raise InputError(path, problem, f"apply it to the bundle with SHA-256 {info['old'][:12]}...")

            for one in header.entries.values():  # nothing is written before all tensors are found
                if one.is_pad and one.nbytes >= ALIGNMENT_BYTES:
                    raise ParseError(f"tensor {one.name[:80]!r} is no valid gap filler")
                if not one.is_pad:
                    tensor_bytes(one).release()
            with open_atomic(out) as file:
                digest = _write(head, header, tensor_bytes, file.write)
                if digest != info["new"]:
                    raise ParseError(f"it and {old} do not make the bundle it names: one of the two is damaged")
    except ParseError as error:
        raise InputError(path, str(error), "copy or make the update again") from None
    return {"bytes": header.data_start + max(one.end for one in header.entries.values()), "digest": digest}


def _update_info(own: Header) -> Mapping[str, str]:
    if UPDATE_KEY not in own.metadata:
        raise ParseError(f"metadata key {UPDATE_KEY} is missing: it is no update")
    info = load_json(own.metadata[UPDATE_KEY].encode(), UPDATE_KEY)
    if not isinstance(info, dict) or type(info.get("format")) is not int:
        raise ParseError(f"{UPDATE_KEY} has no format")
    if info["format"] != UPDATE_FORMAT:
        raise ParseError(f"is of format {info['format']}; this version reads {UPDATE_FORMAT}")
    for key in ("old", "new"):
        if not isinstance(info.get(key), str):
            raise ParseError(f"{UPDATE_KEY} has no digest `{key}`")
    return info


def _new_head(own: Header, view: memoryview) -> bytes:
    """The header of the new bundle, length bytes included, out of an update."""
    if HEAD not in own.entries or own.entries[HEAD].dtype != "U8":
        raise ParseError(f"has no tensor `{HEAD}`")
    unpacking = zlib.decompressobj()
    with _slice(view, own, own.entries[HEAD]) as data:
        try:
            head = unpacking.decompress(data, MAX_HEADER_BYTES)
        except zlib.error as error:
            raise ParseError(f"its tensor `{HEAD}` is damaged: {error}") from None
    if not unpacking.eof or int.from_bytes(head[:8], "little") != len(head) - 8:
        raise ParseError(f"its tensor `{HEAD}` is damaged: its length does not fit")
    return head


def _slice(view: memoryview, header: Header, wanted: Entry) -> memoryview:
    """The bytes of a tensor in this container; ParseError where its dtype or shape differs."""
    one = header.entries[wanted.name]
    if (one.dtype, one.shape) != (wanted.dtype, wanted.shape):
        raise ParseError(f"tensor {one.name[:12]} has shape {one.shape} of {one.dtype} in one file only")
    return view[header.data_start + one.begin : header.data_start + one.end]


def _pieces(head: bytes, header: Header, tensor_bytes: TensorBytes) -> Iterator[bytes | memoryview]:
    """A bundle from its first byte to its last."""
    yield head
    for one in header.entries.values():
        if one.is_pad:
            yield bytes(one.nbytes)
            continue
        with tensor_bytes(one) as data:
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]


def _write(head: bytes, header: Header, tensor_bytes: TensorBytes, write: Callable[[Any], object] = len) -> str:
    """Write a bundle and return its SHA-256."""
    digest = hashlib.sha256()
    for piece in _pieces(head, header, tensor_bytes):
        digest.update(piece)
        write(piece)
    return digest.hexdigest()
