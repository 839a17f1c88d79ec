"""Prepared graphs in the cache: a folder for a bundle, this processor and this ONNX Runtime. Needs no torch.

    index.json   what is where, and a MAC by this user's key
    weights.bin  the weights of all graphs as ONNX Runtime laid them out, equal ones once, for a mapping
    0.onnx ...   the graph of each query, which refers to weights.bin

Files have mode 0400 and are never written again: a box that maps them keeps what it has when they are replaced. The
cache is trusted by its owner, modes, sizes and the MAC; contents are hashed when they are written, and by
`gemel bundle verify`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import platform
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from gemel.edge_runtime.memory.allocator import Extent
from gemel.models.export.network_outputs import NetworkOutputs
from gemel.models.files.io import cache_folder, open_atomic, own_bytes, private_folder

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle

FORMAT = 2
"""Incremented when graphs are prepared differently, so that older ones are prepared anew."""
FOLDER, KEY_FILE, INDEX, WEIGHTS = "prepared", "prepared.key", "index.json", "weights.bin"
MAKING = ".making-"
"""Begins the name of a folder that is not complete."""
MAX_INDEX_BYTES, MAX_GRAPH_BYTES = 2**26, 2**27
KEY_BYTES = 32
MAX_FOLDERS = 4
"""Prepared bundles that stay in the cache, those used last: a box has one, or two while it compares them."""
READ_ONLY = 0o400
PAGE_BYTES = mmap.PAGESIZE
MAX_SEGMENTS, MIN_SEGMENT_BYTES = 256, 1 << 18
"""Ranges of pages that are loaded and evicted as a whole: about so many a file, and not smaller, since each costs a
call of the system."""

Size = Annotated[int, Field(ge=0, le=1 << 50)]


class PreparationError(Exception):
    """A folder of the cache that cannot be used; the message says why in a few words."""


@dataclass(frozen=True)
class PreparedTensor:
    """An initialiser of a graph in weights.bin; `is_bound`: the session gets it, else ONNX Runtime maps it itself.

    `content` is the place of its bytes in `contents`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: int
    is_bound: bool


@dataclass(frozen=True)
class PreparedQuery:
    """The graph of a query: its file, its input, what its outputs mean, and the contents that a run reads.

    `batch` is None where it is open. `workspace` are the peak bytes of a run by batch, frames included, where the
    system reports it.
    """

    file: str
    sha256: str
    input: str
    input_shape: tuple[int | str, ...]
    outputs: NetworkOutputs
    batch: int | None
    tensors: tuple[PreparedTensor, ...]
    reads: tuple[int, ...]
    workspace: dict[int, int]


@dataclass(frozen=True)
class PreparedContent:
    """Bytes of weights.bin by the SHA-256 of their content: `nbytes` from `offset` on."""

    sha256: str
    offset: Size
    nbytes: Size

    @property
    def extent(self) -> Extent:
        """Where its bytes lie."""
        return Extent(self.offset, self.nbytes)


@dataclass(frozen=True)
class PreparedIndex:
    """Everything about a prepared folder; `failed` are the queries that could not be prepared, with the reasons."""

    format: int
    key: str
    weights_bytes: Size
    contents: tuple[PreparedContent, ...]
    queries: dict[str, PreparedQuery]
    failed: dict[str, str]
    peak_bytes: Size
    seconds: float


_INDEX = TypeAdapter(PreparedIndex)


def index_json(index: PreparedIndex) -> bytes:
    """The index as its file holds it."""
    return _INDEX.dump_json(index)


@dataclass(frozen=True)
class PreparedBundle:
    """A prepared folder that was checked."""

    folder: Path
    index: PreparedIndex

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def to_json(self) -> dict[str, Any]:
        """The value as `gemel prepare --json` prints it."""
        return {
            "path": str(self.folder), "bytes": self.nbytes, "weights_bytes": self.index.weights_bytes,
            "queries": list(self.index.queries), "failed": self.index.failed, "peak_bytes": self.index.peak_bytes,
            "seconds": round(self.index.seconds, 3),
        }  # fmt: skip


def preparation_key(bundle: Bundle) -> str:
    """What a prepared folder depends on: the sealed header, which names every tensor, the runtime and the processor."""
    import onnxruntime

    head = hashlib.sha256(bundle.mapping[: bundle.header.data_start]).hexdigest()
    parts = [FORMAT, head, onnxruntime.__version__, platform.machine(), processor_features()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def processor_features() -> list[str]:
    """The instruction sets that ONNX Runtime chooses its kernels by, where the system names them (Linux)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    named = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features", "CPU part"))}
    return sorted(" ".join(sorted(line.split())) for line in named)


def prepared_folder() -> Path:
    """The folder of all prepared bundles of this user, created if need be; InputError where others may write to it."""
    return private_folder(cache_folder() / FOLDER)


def folder_of(key: str) -> Path:
    """Where the graphs of a key are, or will be."""
    return prepared_folder() / key[:32]


def read_prepared(folder: Path, key: str) -> PreparedBundle:
    """A folder of the cache, checked; raises PreparationError for what cannot be trusted, FileNotFoundError for none.

    Its last use is noted.
    """
    try:
        text = own_bytes(folder / INDEX, MAX_INDEX_BYTES)
        mac, _, body = text.partition(b"\n")
        if not hmac.compare_digest(mac, _mac_of(body)):
            raise PreparationError("its index was not written with this user's key")
        index = _INDEX.validate_json(body)
        if (index.format, index.key) != (FORMAT, key):
            raise PreparationError("it is of another version")
        _check_files(folder, index)
    except FileNotFoundError as error:
        if folder.is_dir():
            raise PreparationError(f"{Path(str(error.filename)).name} is missing") from error
        raise
    except ValidationError as error:
        raise PreparationError("its index is of another version") from error
    except OSError as error:
        raise PreparationError(f"it cannot be read: {error.strerror}") from error
    os.utime(folder)
    return PreparedBundle(folder, index)


def _check_files(folder: Path, index: PreparedIndex) -> None:
    status = os.stat(folder / WEIGHTS, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PreparationError(f"{WEIGHTS} is not this user's own")
    if status.st_size != index.weights_bytes:
        raise PreparationError(f"{WEIGHTS} has {status.st_size} bytes instead of {index.weights_bytes}")
    for content in index.contents:
        if content.offset + content.nbytes > index.weights_bytes:
            raise PreparationError("its index is damaged")
    for query in index.queries.values():
        if Path(query.file).name != query.file:
            raise PreparationError("its index is damaged")
        data = own_bytes(folder / query.file, MAX_GRAPH_BYTES)
        if hashlib.sha256(data).hexdigest() != query.sha256:
            raise PreparationError(f"{query.file} is damaged")


def write_index(folder: Path, index: PreparedIndex) -> None:
    """Write the index of a folder that is being made, and make its files read-only."""
    body = index_json(index)
    path = folder / INDEX
    path.write_bytes(_mac_of(body) + b"\n" + body)
    for file in folder.iterdir():
        os.chmod(file, READ_ONLY)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def verify_contents(prepared: PreparedBundle) -> list[str]:
    """What in weights.bin is not what was written, one line each; reads all of it."""
    problems = []
    with open(prepared.folder / WEIGHTS, "rb") as file:
        for content in prepared.index.contents:
            file.seek(content.offset)
            if hashlib.sha256(file.read(content.nbytes)).hexdigest() != content.sha256:
                place = f"the {content.nbytes} bytes at {content.offset}"
                problems.append(f"{prepared.folder / WEIGHTS}: {place} are damaged; remove the folder")
    return problems


def _mac_of(body: bytes) -> bytes:
    return hmac.new(_user_key(), body, hashlib.sha256).hexdigest().encode()


def _user_key() -> bytes:
    """The key of this user's indices, made once."""
    path = private_folder(cache_folder()) / KEY_FILE
    try:
        key = own_bytes(path, KEY_BYTES)
    except OSError:
        key = b""
    if len(key) != KEY_BYTES:
        key = secrets.token_bytes(KEY_BYTES)
        with open_atomic(path, overwrite=True) as file:
            file.write(key)
        os.chmod(path, 0o600)
    return key


def publish(making: Path, folder: Path) -> None:
    """Give a complete folder its name; one that is there, and cannot be used, goes."""
    old = folder.with_name(f"{MAKING}{secrets.token_hex(8)}")
    if folder.exists():
        os.rename(folder, old)
    os.rename(making, folder)
    remove_tree(old)


def remove_old(folder: Path) -> None:
    """Remove the folders that were used longest ago, and what interrupted preparations left; `folder` stays.

    A box that maps one of them goes on with it.
    """
    day_ago = time.time() - 24 * 3600
    others = []
    for path in folder.parent.iterdir():
        if path == folder or not path.is_dir():
            continue
        used = path.stat().st_mtime
        if not path.name.startswith(MAKING):
            others.append((used, path))
        elif used < day_ago:
            remove_tree(path)
    for _, path in sorted(others, reverse=True)[MAX_FOLDERS - 1 :]:
        remove_tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder of the cache, as far as it can be."""
    shutil.rmtree(folder, ignore_errors=True)


def page_segments(index: PreparedIndex, piece_bytes: int = 0) -> tuple[dict[str, Extent], dict[str, tuple[str, ...]]]:
    """The ranges of pages that runs read, by name, and those of each query.

    A range holds contents that the same queries read, and begins and ends at a page; `piece_bytes` bounds one that has
    several pages (1/MAX_SEGMENTS of the file unless given).
    """
    readers: dict[int, list[str]] = {}
    for query, prepared in index.queries.items():
        for place in prepared.reads:
            readers.setdefault(place, []).append(query)
    limit = page_ceiling(piece_bytes or max(MIN_SEGMENT_BYTES, index.weights_bytes // MAX_SEGMENTS))
    extents: dict[str, Extent] = {}
    names: dict[str, list[str]] = {query: [] for query in index.queries}
    spans: list[tuple[list[str], int, int]] = []
    for place in sorted(readers):
        content = index.contents[place]
        end = page_ceiling(content.offset + content.nbytes)
        if spans and spans[-1][0] == readers[place] and content.offset <= spans[-1][2]:
            spans[-1] = (*spans[-1][:2], end)
        else:
            spans.append((readers[place], content.offset // PAGE_BYTES * PAGE_BYTES, end))
    for queries, start, end in spans:
        for offset in range(start, end, limit):
            name = f"{offset:x}"
            extents[name] = Extent(offset, min(limit, end - offset))
            for query in queries:
                names[query].append(name)
    return extents, {query: tuple(own) for query, own in names.items()}


def page_ceiling(nbytes: int) -> int:
    """The bytes of the whole pages that hold so many bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
