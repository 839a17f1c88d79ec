"""The bundle's container: a safetensors file with our own order, alignment and seal of the tensors.

Layout: 8 bytes little-endian header length, the JSON header padded with spaces, the data section. The header
is sealed: metadata key `gemel.digest` is the SHA-256 of the length bytes and the header with its own 64
digits as zeros. Since tensor names are hashes of their content, the seal covers every tensor too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from models.errors import BundleError, size_text
from models.io import ParseError, open_regular, parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
ITEM_BYTES = {code: nbytes for code, (_, nbytes) in _DTYPES.items()}
"""Bytes of one number by dtype code; a bundle has no other codes."""
_CODES = {name: code for code, (name, _) in _DTYPES.items()}


def code_of(dtype: torch.dtype) -> str:
    """The dtype code of a torch dtype; KeyError for one that no bundle holds."""
    return _CODES[str(dtype).removeprefix("torch.")]


def has_code(dtype: torch.dtype) -> bool:
    """Whether a bundle can hold tensors of a torch dtype."""
    return str(dtype).removeprefix("torch.") in _CODES


def dtype_of(code: str) -> torch.dtype:
    """The torch dtype of a code."""
    import torch

    return getattr(torch, _DTYPES[code][0])


ALIGNMENT_BYTES = 512
MAX_HEADER_BYTES = 32 << 20
"""About 200,000 tensors, read in two seconds."""
MAX_BYTES = 1 << 50
MAX_DIMENSIONS = 8
DIGEST_KEY = "gemel.digest"

_OPENING = b'{"__metadata__":{"gemel.digest":"'
_DIGEST_AT = 8 + len(_OPENING)
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Entry:
    """One tensor of the container: dtype code, shape, and its bytes [begin, end) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as stored."""
        return self.end - self.begin

    @property
    def is_pad(self) -> bool:
        """Whether this is a gap filler, which counts as nothing."""
        return self.name.startswith("pad.")


@dataclass(frozen=True)
class Header:
    """What a container holds: its tensors in file order, its metadata, and where the data section starts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def tensor_name(dtype: str, shape: Sequence[int], data: Any) -> str:
    """The content name of a tensor: SHA-256 hex of `F32[64,3,7,7]` (ASCII) followed by its bytes."""
    digest = tensor_hash(dtype, shape)
    digest.update(data)
    return digest.hexdigest()


def tensor_hash(dtype: str, shape: Sequence[int]) -> hashlib._Hash:
    """The hash of a tensor's content name before its bytes are added."""
    return hashlib.sha256(f"{dtype}[{','.join(map(str, shape))}]".encode())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy where it is contiguous on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def place(sizes: Iterable[tuple[str, str, tuple[int, ...], int]], alignment: int = ALIGNMENT_BYTES) -> list[Entry]:
    """Lay tensors (name, dtype, shape, bytes) end to end in the order given, each at a multiple of `alignment`."""
    entries: list[Entry] = []
    at = pads = 0
    for name, dtype, shape, nbytes in sizes:
        gap = -at % alignment
        if gap:
            entries.append(Entry(f"pad.{pads}", "U8", (gap,), at, at + gap))
            pads += 1
            at += gap
        entries.append(Entry(name, dtype, shape, at, at + nbytes))
        at += nbytes
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The length bytes and the sealed header, padded so that the data section starts at a multiple of 512 bytes."""
    header: dict[str, Any] = {"__metadata__": {DIGEST_KEY: _NO_DIGEST, **metadata}}
    for entry in entries:
        offsets = [entry.begin, entry.end]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ParseError(f"the header would have {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    blank = len(text).to_bytes(8, "little") + text
    digits = hashlib.sha256(blank).hexdigest().encode()
    return blank[:_DIGEST_AT] + digits + blank[_DIGEST_AT + 64 :]


def parse_header(buffer: Any) -> Header:
    """The header of an untrusted file (bytes or a mapping); allocates nothing for its tensors.

    Raises ParseError when a length, type, shape, dtype or offset is wrong, when tensors overlap or leave holes,
    when the file is truncated or longer than its tensors, or when the seal is broken.
    """
    size = len(buffer)
    if size < 10:
        raise ParseError(f"the file is truncated: {size} bytes")
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ParseError(f"the header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise ParseError(f"the file is truncated: {size} bytes, the header alone claims {length}")
    return parse_head(bytes(buffer[: 8 + length]), size - 8 - length)


def parse_head(head: bytes, data_bytes: int | None = None) -> Header:
    """The header alone, length bytes included, before `data_bytes` of data (None: as many as its tensors take).

    Raises ParseError as `parse_header` does.
    """
    _check_seal(head)
    document = load_json(head[8:], "the header")
    if not isinstance(document, dict):
        raise ParseError("the header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ParseError("the header's metadata is not text by name")
    entries = sorted((_entry(name, given) for name, given in document.items()), key=lambda e: (e.begin, e.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            problem = "overlaps the one before it" if entry.begin < at else "leaves a hole before it"
            raise ParseError(f"tensor {entry.name[:80]!r} {problem}")
        at = entry.end
    available = at if data_bytes is None else data_bytes
    if not at or at > available:
        raise ParseError(f"the file is truncated: its tensors take {at} bytes, {available} are there")
    if at < available:
        raise ParseError(f"the file is longer than its tensors: {available - at} bytes too many")
    return Header({entry.name: entry for entry in entries}, metadata, len(head))


def load_json(data: bytes, what: str) -> Any:
    """Untrusted JSON of a header, within bounds; raises ParseError."""
    try:
        return parse_json(data)
    except ParseError as error:
        raise ParseError(f"{what} is not JSON: {error}") from None


def _check_seal(head: bytes) -> None:
    if head[8:_DIGEST_AT] != _OPENING:
        raise ParseError("the header does not start with a bundle's digest: damaged, or no bundle at all")
    blank = head[:_DIGEST_AT] + _NO_DIGEST.encode() + head[_DIGEST_AT + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != head[_DIGEST_AT : _DIGEST_AT + 64]:
        raise ParseError("the header is damaged: its digest does not match")


def _entry(name: str, given: Any) -> Entry:
    where = f"tensor {name[:80]!r}"
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise ParseError(f"{where} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ParseError(f"{where} has the unknown dtype {str(dtype)[:20]!r}")
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(1, n) for n in shape) > MAX_BYTES:
        raise ParseError(f"{where} has no valid shape")
    if not _is_naturals(offsets) or len(offsets) != 2:
        raise ParseError(f"{where} has no valid data_offsets")
    if math.prod(shape) * ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise ParseError(f"{where}: shape {shape} of {dtype} and {offsets[1] - offsets[0]} bytes do not agree")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


MAX_SPARSE_BYTES, MIN_DISK_FRACTION = 1 << 30, 1 / 16
"""A larger file of which less than this fraction is on the disk is a hole, not a bundle; it is not hashed."""
CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 512  # of st_blocks, whatever the disk's own


class Stamp(NamedTuple):
    """Inode, size and modification time: a change of a file that shows without reading it."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(eq=False)
class BundleFile:
    """The regular file of an open bundle, read by its descriptor. Safe between threads.

    A mapped page that the file lost meanwhile ends the process (SIGBUS), so tensors are read with `read`, which raises
    OSError. `opened_as` is the stamp at opening. With `proven`, the stamp at hashing, `read` fails after any change.
    """

    path: Path
    descriptor: int
    proven: Stamp | None = None

    def __post_init__(self) -> None:
        self.opened_as = self.stamp()
        weakref.finalize(self, os.close, self.descriptor)

    def stamp(self) -> Stamp:
        """The present stamp of the file that was opened, even if another file has its path now."""
        return _stamp(os.fstat(self.descriptor))

    def map(self) -> mmap.mmap:
        """The whole file, read-only."""
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def read(self, begin: int, into: memoryview) -> None:
        """Fill `into` from byte `begin`; OSError where bytes are gone or the file is not as proven."""
        done, wanted = 0, len(into)
        while done < wanted:
            read = os.preadv(self.descriptor, [into[done:]], begin + done)
            if not read:
                raise OSError(errno.EIO, "the bundle has become shorter")
            done += read
        self.check()

    def check(self) -> None:
        """OSError where the file has changed since it was proven; call it after bytes were read another way."""
        if self.proven is not None and self.stamp() != self.proven:
            raise OSError(errno.EIO, "the bundle was changed in place")


def is_open_as(file: BundleFile) -> bool:
    """Whether the path still leads to this file, unchanged since it was opened."""
    try:
        return _stamp(os.stat(file.path)) == file.opened_as
    except OSError:
        return False


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def open_file(path: Path, remedy: str) -> BundleFile:
    """Open a bundle's file; InputError when it cannot be read, BundleError when it is empty or mostly a hole."""
    with open_regular(path, "give the path of a bundle") as file:
        status = os.fstat(file.fileno())
        if status.st_size == 0:
            raise BundleError(path, "the file is truncated: 0 bytes", remedy)
        on_disk = status.st_blocks * _BLOCK_BYTES
        if status.st_size > MAX_SPARSE_BYTES and on_disk < status.st_size * MIN_DISK_FRACTION:
            sizes = f"{size_text(on_disk)} of {size_text(status.st_size)}"
            raise BundleError(path, f"only {sizes} are on the disk: the copy is incomplete", remedy)
        return BundleFile(path, os.dup(file.fileno()))
