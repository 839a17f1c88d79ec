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
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from gemel.models.errors import BundleError
from gemel.models.files.documents import ParseError
from gemel.models.files.io import open_regular

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
"""About 200,000 tensors."""
NO_BUNDLE = "this is no bundle"
MAX_BYTES = 1 << 50
MAX_DIMENSIONS = 8
DIGEST_KEY = "gemel.digest"
PAD = "pad."
"""Begins the name of a gap filler."""

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
        return self.name.startswith(PAD)


@dataclass(frozen=True)
class Header:
    """What a container holds: its tensors in file order, its metadata without the seal, and where the data starts."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int

    @property
    def tensors(self) -> list[Entry]:
        """The tensors without the gap fillers, in file order."""
        return [entry for entry in self.entries.values() if not entry.is_pad]

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return max((entry.end for entry in self.entries.values()), default=0)


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


def place(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """Lay tensors (name, dtype, shape) end to end in the order given, each at a multiple of ALIGNMENT_BYTES."""
    entries: list[Entry] = []
    at = pads = 0
    for name, dtype, shape in tensors:
        if gap := -at % ALIGNMENT_BYTES:
            entries.append(Entry(f"{PAD}{pads}", "U8", (gap,), at, at + gap))
            pads += 1
            at += gap
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(Entry(name, dtype, shape, at, at + nbytes))
        at += nbytes
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The length bytes and the sealed header, padded so that the data section starts at a multiple of 512 bytes."""
    header: dict[str, Any] = {"__metadata__": {DIGEST_KEY: _NO_DIGEST, **metadata}}
    for entry in entries:
        offsets = [entry.begin, entry.end]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ParseError(f"the header would have {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    blank = len(text).to_bytes(8, "little") + text
    digits = hashlib.sha256(blank).hexdigest().encode()
    return blank[:_DIGEST_AT] + digits + blank[_DIGEST_AT + 64 :]


class _TensorKeys(TypedDict):
    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_BYTES)]], Field(max_length=MAX_DIMENSIONS)
    ]


_METADATA, _TENSORS = TypeAdapter(dict[str, str]), TypeAdapter(dict[str, _TensorKeys])


def parse_header(buffer: Any) -> Header:
    """The header of an untrusted file (bytes or a mapping); allocates nothing for its tensors.

    Raises ParseError when the header is not as `encode_header` writes it, or the file does not end with its tensors.
    """
    size = len(buffer)
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ParseError(
            f"{NO_BUNDLE}: its header would have {length} bytes, more than {MAX_HEADER_BYTES}"
        )
    if size < 10 or 8 + length > size:
        raise ParseError(f"the file is truncated: {size} bytes")
    header = parse_head(bytes(buffer[: 8 + length]))
    expected_size = header.data_start + header.data_bytes
    if size != expected_size:
        fault = "truncated" if size < expected_size else "too long"
        raise ParseError(f"the file is {fault}: {size} bytes instead of {expected_size}")
    return header


def parse_head(head: bytes) -> Header:
    """The header alone, length bytes included.

    Names, dtypes and shapes determine the one header that `encode_header` writes for them, seal included. Any other,
    with tensors that overlap, leave holes or are not aligned, raises ParseError.
    """
    try:
        tensors = json.loads(head[8:])
        metadata = _METADATA.validate_python(tensors.pop("__metadata__"), strict=True)
        del metadata[DIGEST_KEY]
        descriptions = _TENSORS.validate_python(tensors, strict=True)
        contents = {
            name: description
            for name, description in descriptions.items()
            if not name.startswith(PAD)
        }
        entries = place(
            (name, description["dtype"], tuple(description["shape"]))
            for name, description in contents.items()
        )
        is_sound = encode_header(entries, metadata) == head
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ParseError(f"the header is damaged, or {NO_BUNDLE}")
    return Header({entry.name: entry for entry in entries}, metadata, len(head))


CHUNK_BYTES = 4 << 20


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
        done = 0
        total = len(into)
        while done < total:
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


def open_file(path: Path, hint: str) -> BundleFile:
    """Open a bundle's file; InputError when it cannot be read, BundleError when it is empty."""
    with open_regular(path, "give the path of a bundle") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise BundleError(path, "the file is truncated: 0 bytes", hint)
        return BundleFile(path, os.dup(file.fileno()))
