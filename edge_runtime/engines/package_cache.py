"""The cache of what engines make once per architecture (compiled packages, graphs), and its keys.

Packages are loaded as code, so the folder must be this user's alone: mode 0700, and no folder above it writable by
others.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import models
from models.bundle import BundleQuery
from models.io import ParseError, cache_folder, describe_problem, open_atomic, own_bytes, parse_json, private_folder


def architecture_key(query: BundleQuery, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What a package depends on, weights excepted, as JSON values: queries with one key share one package.

    The model's name, arguments and input size; the shape and dtype of each tensor; the source of its modules; versions,
    and the CPU or GPU.
    """
    tensors = [(path, str(tensor.dtype), list(tensor.shape)) for path, tensor in model.state_dict().items()]
    return {
        "model": query.model,
        "model_args": dict(query.model_args),
        "task": query.task,
        "classes": len(query.classes),
        "input_size": query.input_size,
        "tensors": _digest(repr(tensors).encode()),
        "source": source_digest(model),
        "machine": machine_key(device.type),
    }


def source_digest(model: nn.Module) -> str:
    """A digest of the files that say what a model computes: those of its modules' classes, and the whole zoo."""
    files = {inspect.getsourcefile(kind) or "" for kind in {type(module) for module in model.modules()}}
    return _digest(*(_contents(file) for file in sorted({*files, *_zoo_files()} - {""})))


@functools.lru_cache
def machine_key(device: str) -> dict[str, Any]:
    """Versions, threads, and the model of CPU or GPU, as far as machine code depends on them."""
    found = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if device == "cuda":
        return found | {
            "gpu": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
        }
    return found | {"cpu": cpu_digest()}


def cpu_digest() -> str:
    """A digest of the CPU's name and features: packages are compiled for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return _digest(torch.backends.cpu.get_cpu_capability().encode(), *(line.encode() for line in sorted(kept)))


@functools.lru_cache
def _zoo_files() -> tuple[str, ...]:
    return tuple(str(path) for path in sorted(Path(models.__file__).parent.glob("zoo/**/*.py")))


@functools.cache
def _contents(file: str) -> bytes:
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


RECORD = ".json"
COMPILERS = "inductor"
MAX_CACHED_FILE_BYTES, MAX_RECORD_BYTES = 2**31, 2**25


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache, and the notes its maker left on it (JSON values)."""

    path: Path
    notes: Mapping[str, Any]


class EngineCache:
    """A private folder of files by key, written atomically, each made once even when processes start together.

    `folder` is `gemel/engines` in $XDG_CACHE_HOME (~/.cache unless set) if not given; it is created with mode 0700.
    Symbolic links to it are resolved once: what was checked is what is used. Raises InputError when it belongs to
    another user or others may write to it, or cannot be made.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = private_folder(Path(folder) if folder else cache_folder() / "engines")

    def find(self, key: Mapping[str, Any], suffix: str) -> CachedFile | None:
        """The file of this key; None when there is none, or when its bytes are not what was written."""
        path = self._path(key, suffix)
        try:
            record = parse_json(own_bytes(path.with_name(path.name + RECORD), MAX_RECORD_BYTES))
            if record["key"] != _plain(key):
                return None
            notes = record["notes"]
            if record["sha256"] != _record_digest(own_bytes(path, min(record["bytes"], MAX_CACHED_FILE_BYTES)), notes):
                return None
        except (OSError, ParseError, KeyError, TypeError, AttributeError):
            return None
        return CachedFile(path, json.loads(notes))

    def fetch(self, key: Mapping[str, Any], suffix: str, make: Callable[[Path], Mapping[str, Any]]) -> CachedFile:
        """The file of this key; where there is no sound one, `make` writes it and returns notes.

        `make` is given a path in a private temporary folder. It is called by one process at a time for one key; when it
        raises, nothing is left behind.
        """
        found = self.find(key, suffix)
        if found is not None:
            return found
        path = self._path(key, suffix)
        with describe_problem(self.folder), self._hold_lock(path):
            found = self.find(key, suffix)
            if found is not None:
                return found
            making = f".making-{path.stem}-"
            for left in self.folder.glob(f"{making}*"):  # by a process that was killed: this one holds the lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=making) as folder:
                made = Path(folder) / f"made{suffix}"
                noted = json.dumps(dict(make(made)))
                data = made.read_bytes()
            record = {"key": _plain(key), "bytes": len(data), "sha256": _record_digest(data, noted), "notes": noted}
            with open_atomic(path, overwrite=True) as file:
                file.write(data)
            with open_atomic(path.with_name(path.name + RECORD), overwrite=True) as file:
                file.write(json.dumps(record, indent=1).encode())
        return CachedFile(path, json.loads(noted))

    def compilers(self) -> Path:
        """A private folder for the caches of compilers, which they run as code too."""
        return private_folder(self.folder / COMPILERS)

    def _path(self, key: Mapping[str, Any], suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}{suffix}"

    @contextmanager
    def _hold_lock(self, path: Path) -> Iterator[None]:
        """Hold the key's lock; the system releases it when a process dies."""
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _record_digest(data: bytes, notes: str) -> str:
    """The digest of a file together with its notes, so that neither is used without the other."""
    return hashlib.sha256(hashlib.sha256(data).digest() + notes.encode()).hexdigest()


def _plain(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key))
