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

from models import io as bounded
from models.errors import BundleError, size_text
from models.io import opened, parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _NAMES.items()}
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one number by code; the codes are all that a bundle may have."""


def code_of(dtype: torch.dtype) -> str:
    """The code of torch's dtype; KeyError for one that no bundle holds."""
    return _CODES[str(dtype).removeprefix("torch.")]


def has_code(dtype: torch.dtype) -> bool:
    """Whether a bundle can hold tensors of torch's dtype."""
    return str(dtype).removeprefix("torch.") in _CODES


def dtype_of(code: str) -> torch.dtype:
    """Torch's dtype of a code."""
    import torch

    return getattr(torch, _NAMES[code])


ALIGNMENT_BYTES = 512
MAX_HEADER_BYTES, MAX_HEADER_VALUES = 32 << 20, 4_000_000
"""Some 200,000 tensors; it is read in two seconds."""
MAX_BYTES = 1 << 50
MAX_DIMENSIONS = 8
DIGEST_KEY = "gemel.digest"

_OPENING = b'{"__metadata__":{"gemel.digest":"'
_DIGEST_AT = 8 + len(_OPENING)
_NO_DIGEST = "0" * 64


class Fault(ValueError):
    """What is wrong with the bytes of a container; the caller adds which file."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the container: safetensors dtype code, shape, and its bytes [begin, end) in the data
    section.
    """

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
    """What a tensor's bytes are to be added to, piece by piece, for its content name."""
    return hashlib.sha256(f"{dtype}[{','.join(map(str, shape))}]".encode())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy where it is already contiguous on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def place(sizes: Iterable[tuple[str, str, tuple[int, ...], int]], alignment: int = ALIGNMENT_BYTES) -> list[Entry]:
    """Lay tensors (name, dtype, shape, bytes) end to end in the order given, each at a multiple of
    `alignment`.
    """
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
    """The length bytes and the sealed header, padded so that the data section starts at a multiple of 512
    bytes.
    """
    header: dict[str, Any] = {"__metadata__": {DIGEST_KEY: _NO_DIGEST, **metadata}}
    for entry in entries:
        offsets = [entry.begin, entry.end]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise Fault(f"the header would have {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    blank = len(text).to_bytes(8, "little") + text
    digits = hashlib.sha256(blank).hexdigest().encode()
    return blank[:_DIGEST_AT] + digits + blank[_DIGEST_AT + 64 :]


def check_seal(head: bytes) -> None:
    """Raise Fault unless the digest in the header matches the header; `head` includes the length bytes."""
    if head[8:_DIGEST_AT] != _OPENING:
        raise Fault("the header does not start with a bundle's digest: damaged, or no bundle at all")
    blank = head[:_DIGEST_AT] + _NO_DIGEST.encode() + head[_DIGEST_AT + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != head[_DIGEST_AT : _DIGEST_AT + 64]:
        raise Fault("the header is damaged: its digest does not match")


def parse_header(buffer: Any) -> Header:
    """Read the header of an untrusted file of bytes (a mapping will do); nothing is allocated for its
    tensors.

    Raises Fault when a length, type, shape, dtype or offset is wrong, when tensors overlap or leave holes,
    when the file is truncated or longer than its tensors, or when the seal is broken.
    """
    size = len(buffer)
    if size < 10:
        raise Fault(f"the file is truncated: {size} bytes")
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise Fault(f"the header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise Fault(f"the file is truncated: {size} bytes, the header alone claims {length}")
    return parse_head(bytes(buffer[: 8 + length]), size - 8 - length)


def parse_head(head: bytes, data_bytes: int | None = None) -> Header:
    """The header alone, length bytes included, of a container with so many bytes of data; None takes what its tensors
    take. Raises Fault as `parse_header` does.
    """
    check_seal(head)
    document = loads_strict(head[8:], "the header")
    if not isinstance(document, dict):
        raise Fault("the header is not a JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Fault("the header's metadata is not text by name")
    entries = sorted((_entry(name, given) for name, given in document.items()), key=lambda e: (e.begin, e.end))
    taken = max((entry.end for entry in entries), default=0)
    _check_contiguous(entries, taken if data_bytes is None else data_bytes)
    return Header({entry.name: entry for entry in entries}, metadata, len(head))


def loads_strict(data: bytes, what: str) -> Any:
    """Untrusted JSON within bounds (models.io); raises Fault."""
    try:
        return parse_json(data, MAX_HEADER_VALUES)
    except bounded.ParseError as fault:
        raise Fault(f"{what} is not JSON: {fault.text}") from None


def _entry(name: str, given: Any) -> Entry:
    where = f"tensor {name[:80]!r}"
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise Fault(f"{where} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Fault(f"{where} has the unknown dtype {str(dtype)[:20]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise Fault(f"{where} has no proper shape")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Fault(f"{where} has no proper data_offsets")
    if math.prod(max(1, size) for size in shape) > MAX_BYTES:
        raise Fault(f"{where}: the shape {str(shape)[:80]} is larger than any tensor")
    if math.prod(shape) * ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise Fault(f"{where}: shape {shape} of {dtype} and {offsets[1] - offsets[0]} bytes do not agree")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_contiguous(entries: Sequence[Entry], data_bytes: int) -> None:
    if data_bytes == 0:
        raise Fault("the file holds no data")
    at = 0
    for entry in entries:
        if entry.begin != at:
            problem = "overlaps the one before it" if entry.begin < at else "leaves a hole before it"
            raise Fault(f"tensor {entry.name[:80]!r} {problem}")
        at = entry.end
    if at > data_bytes:
        raise Fault(f"the file is truncated: its tensors take {at} bytes, {data_bytes} are there")
    if at < data_bytes:
        raise Fault(f"the file is longer than its tensors: {data_bytes - at} bytes too many")


REMEDY_PATH = "give the path of a bundle"
MAX_HOLLOW_BYTES, MIN_PART = 1 << 30, 16
"""A larger file of which less than one in so many bytes is on the disk is a hole, not a bundle; it is not hashed."""
CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 512  # of st_blocks, whatever the disk's own


class Stamp(NamedTuple):
    """By what a change of a file shows without reading it."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(eq=False)
class BundleFile:
    """A regular file, open for as long as this lives. Safe between threads.

    `opened_as` is what it looked like at first. With `proven`, what it looked like when its bytes were hashed, `read`
    fails from the first change on.
    """

    path: Path
    descriptor: int
    proven: Stamp | None = None

    def __post_init__(self) -> None:
        self.opened_as = self.stamp()
        weakref.finalize(self, os.close, self.descriptor)

    def stamp(self) -> Stamp:
        """What it looks like now; the file that was opened, whatever stands at its path since."""
        found = os.fstat(self.descriptor)
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)

    def mapped(self) -> mmap.mmap:
        """All of it, read-only."""
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def read(self, begin: int, into: memoryview) -> None:
        """Fill `into` (bytes) from `begin` on; OSError where these are gone or no longer those that were proven."""
        self.read_unproven(begin, into)
        self.check()

    def check(self) -> None:
        """OSError where the file is not what it was when its bytes were proven; call it after bytes were read."""
        if self.proven is not None and self.stamp() != self.proven:
            raise OSError(errno.EIO, "the bundle was changed in place")

    def read_unproven(self, begin: int, into: memoryview) -> None:
        """The same of whatever stands there now."""
        done, wanted = 0, len(into)
        while done < wanted:
            read = os.preadv(self.descriptor, [into[done:]], begin + done)
            if not read:
                raise OSError(errno.EIO, "the bundle has become shorter")
            done += read


def is_open_as(file: BundleFile) -> bool:
    """Whether what stands at its path is this very file, as it was when it was opened."""
    try:
        found = os.stat(file.path)
    except OSError:
        return False
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns) == file.opened_as


def open_file(path: Path, remedy: str) -> BundleFile:
    """Open it; InputError when it cannot be read, BundleError when it is empty or hollow."""
    with opened(path, REMEDY_PATH) as file:
        found = os.fstat(file.fileno())
        if found.st_size == 0:
            raise BundleError(path, "the file is truncated: 0 bytes", remedy)
        held = found.st_blocks * _BLOCK_BYTES
        if found.st_size > MAX_HOLLOW_BYTES and held * MIN_PART < found.st_size:
            fault = f"of its {size_text(found.st_size)}, {size_text(held)} are on the disk: it was not copied whole"
            raise BundleError(path, fault, remedy)
        return BundleFile(path, os.dup(file.fileno()))
