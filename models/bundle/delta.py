"""Delta updates: the tensors that a box lacks of a new bundle, and the new header.

An update is a container like a bundle's: its tensors under their content names, a tensor `header` with the new bundle's
header (zlib), and the metadata key `gemel.update`, JSON with `format`, `old` and `new`, the SHA-256 of both files.
Applying an update gives the new bundle byte by byte, or fails without writing.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from gemel.models.bundle.format import (
    MAX_HEADER_BYTES,
    Header,
    encode_header,
    parse_head,
    parse_header,
    place,
)
from gemel.models.bundle.manifest import TensorName
from gemel.models.bundle.reader import Bundle, map_file, open_bundle
from gemel.models.errors import BundleError, InputError
from gemel.models.files.documents import ParseError
from gemel.models.files.io import check_apart, check_output, open_atomic

UPDATE_KEY, UPDATE_FORMAT = "gemel.update", 1
HEAD = "header"


@dataclass(frozen=True, slots=True)
class Difference:
    """Size of an update: its `bytes`, its `tensors` of the bundle's `of_tensors`, and the whole bundle's bytes."""

    bytes: int
    tensors: int
    of_tensors: int
    bundle_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class _UpdateInfo(BaseModel):
    """What `gemel.update` holds: the SHA-256 of both files."""

    format: Literal[1]
    old: TensorName
    new: TensorName


def write_update(old: str | Path, new: str | Path, out: str | Path | None) -> Difference:
    """Write what turns the bundle `old` into `new`, byte by byte, to `out`; None only counts it.

    Raises InputError, with nothing written, when a file cannot be read or written, and BundleError when one is no sound
    bundle.
    """
    if out is not None:
        check_apart([("--out", out)], [("the old bundle", old), ("the new bundle", new)])
        check_output(out)
    before = open_bundle(old)
    after = open_bundle(new)
    present = _tensors_of(before)
    tensors = _tensors_of(after)
    head = bytes(after.mapping[: after.header.data_start])
    digest = hashlib.sha256()
    _write_bundle(digest.update, head, after.header, tensors | present)
    if digest.hexdigest() != after.digest:
        problem = f"its tensors and those of {old} do not match their names"
        raise BundleError(after.path, problem, "check both with `gemel bundle verify`")
    missing = [entry for entry in after.header.tensors if entry.name not in present]
    tensors[HEAD] = memoryview(zlib.compress(head, 9))
    entries = place(
        [
            *((entry.name, entry.dtype, entry.shape) for entry in missing),
            (HEAD, "U8", (len(tensors[HEAD]),)),
        ]
    )
    info = _UpdateInfo(format=UPDATE_FORMAT, old=before.digest, new=after.digest)
    own_head = encode_header(entries, {UPDATE_KEY: info.model_dump_json()})
    if out is not None:
        with open_atomic(out) as file:
            file.write(own_head)
            for entry in entries:
                file.write(bytes(entry.nbytes) if entry.is_pad else tensors[entry.name])
    nbytes = len(own_head) + entries[-1].end
    return Difference(nbytes, len(missing), len(after.header.tensors), len(after.mapping))


def apply_update(old: str | Path, update: str | Path, out: str | Path) -> dict[str, Any]:
    """Write to `out` the bundle that an update makes of `old`; returns its `bytes` and `digest`.

    `old` need not be the very file that the update was made from, as long as it has the tensors that are needed.
    Raises InputError, with nothing written, when a file cannot be read or written, when the update is none or does not
    fit `old`, and when the result is not the bundle that the update names.
    """
    check_apart([("--out", out)], [("the old bundle", old), ("the update", update)])
    check_output(out)
    before = open_bundle(old)
    path = Path(update)
    mapping = map_file(path)
    try:
        container = parse_header(mapping)
        info = _update_info(container)
        sent = _slices(container, memoryview(mapping))
        head = _unpack_head(sent.pop(HEAD, memoryview(b"")))
        header = parse_head(head)
        tensors = _tensors_of(before) | sent
        for entry in header.tensors:  # nothing is written before all tensors are found
            if entry.name not in tensors or entry.nbytes != len(tensors[entry.name]):
                problem = f"was not made for {old}, which lacks tensor {entry.name[:12]}"
                raise InputError(
                    path, problem, f"apply it to the bundle with SHA-256 {info.old[:12]}..."
                )
        digest = hashlib.sha256()
        with open_atomic(out) as file:

            def write(piece: bytes | memoryview) -> None:
                digest.update(piece)
                file.write(piece)

            _write_bundle(write, head, header, tensors)
            if digest.hexdigest() != info.new:
                raise ParseError(
                    f"it and {old} do not make the bundle it names: one of the two is damaged"
                )
    except ParseError as error:
        raise InputError(path, str(error), "copy or make the update again") from None
    return {"bytes": header.data_start + header.data_bytes, "digest": info.new}


def _update_info(container: Header) -> _UpdateInfo:
    if UPDATE_KEY not in container.metadata:
        raise ParseError(f"metadata key {UPDATE_KEY} is missing: it is no update")
    try:
        return _UpdateInfo.model_validate_json(container.metadata[UPDATE_KEY], strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ParseError(
            f"{UPDATE_KEY}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None


def _unpack_head(packed: memoryview) -> bytes:
    """The header of the new bundle, length bytes included, out of an update."""
    unpacking = zlib.decompressobj()
    try:
        head = unpacking.decompress(packed, MAX_HEADER_BYTES)
    except zlib.error as error:
        raise ParseError(f"its tensor `{HEAD}` is damaged: {error}") from None
    if not unpacking.eof or int.from_bytes(head[:8], "little") != len(head) - 8:
        raise ParseError(f"its tensor `{HEAD}` is missing or damaged")
    return head


def _tensors_of(bundle: Bundle) -> dict[str, memoryview]:
    return _slices(bundle.header, memoryview(bundle.mapping))


def _slices(header: Header, view: memoryview) -> dict[str, memoryview]:
    """The bytes of each tensor of a container."""
    data = view[header.data_start :]
    return {entry.name: data[entry.begin : entry.end] for entry in header.tensors}


def _write_bundle(
    write: Callable[[Any], object], head: bytes, header: Header, tensors: Mapping[str, memoryview]
) -> None:
    """Pass a bundle to `write`, from its first byte to its last."""
    write(head)
    for entry in header.entries.values():
        write(bytes(entry.nbytes) if entry.is_pad else tensors[entry.name])
