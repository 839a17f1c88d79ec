"""The cache of what engines make once per architecture (compiled packages, graphs), and its keys.

Packages are loaded as code, so the folder must be this user's alone: mode 0700, and no folder above it writable by
others.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

import models
from models.bundle import BundleQuery
from models.io import ParseError, cache_folder, describe_problem, open_atomic, own_bytes, parse_json, private_folder

RECORD_SUFFIX = ".json"
MAX_CACHED_FILE_BYTES, MAX_RECORD_BYTES = 2**31, 2**25


def architecture_key(query: BundleQuery, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What a package depends on, weights excepted, as JSON values: queries with one key share one package.

    The model's name, arguments and input size; the shape and dtype of each tensor; the source of its modules; versions,
    and the CPU or GPU.
    """
    tensors = [(path, str(tensor.dtype), list(tensor.shape)) for path, tensor in model.state_dict().items()]
    return {
        "model": query.network,
        "model_args": dict(query.model_args),
        "task": query.task,
        "classes": len(query.classes),
        "input_size": query.input_size,
        "tensors": _digest(repr(tensors).encode()),
        "source": _source_digest(model),
        "machine": machine_key(device.type),
    }


@functools.lru_cache
def machine_key(device: str) -> dict[str, Any]:
    """Versions, threads, and the model of CPU or GPU, as far as machine code depends on them."""
    found = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if device == "cuda":
        capability = list(torch.cuda.get_device_capability())
        return found | {"gpu": torch.cuda.get_device_name(), "capability": capability, "cuda": torch.version.cuda}
    info = Path("/proc/cpuinfo")
    lines = set(info.read_text().splitlines()) if info.exists() else set()
    features = sorted(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return found | {"cpu": _digest(torch.backends.cpu.get_cpu_capability().encode(), "\n".join(features).encode())}


def _source_digest(model: nn.Module) -> str:
    """A digest of the files that say what a model computes: those of its modules' classes, and the whole zoo."""
    files = {inspect.getsourcefile(kind) or "" for kind in {type(module) for module in model.modules()}}
    zoo = map(str, Path(models.__file__).parent.glob("zoo/**/*.py"))
    return _digest(*(_file_digest(file) for file in sorted({*files, *zoo} - {""})))


@functools.cache
def _file_digest(file: str) -> bytes:
    return hashlib.sha256(Path(file).read_bytes()).digest()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache, and the notes its maker left on it (JSON values)."""

    path: Path
    notes: Mapping[str, Any]


class EngineCache:
    """A private folder of files by key, each made once even when processes start together.

    `folder` is `gemel/engines` in $XDG_CACHE_HOME (~/.cache unless set) if not given; it is created with mode 0700.
    Symbolic links to it are resolved once: what was checked is what is used. Raises InputError when it belongs to
    another user or others may write to it, or cannot be made.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = private_folder(Path(folder) if folder else cache_folder() / "engines")

    def find(self, key: Mapping[str, Any], suffix: str) -> CachedFile | None:
        """The file of this key; None when there is none, or when its bytes are not what was written."""
        path, record_path = self._paths(key, suffix)
        try:
            record = parse_json(own_bytes(record_path, MAX_RECORD_BYTES))
            digest = hashlib.sha256(own_bytes(path, MAX_CACHED_FILE_BYTES)).hexdigest()
            if (record["key"], record["sha256"]) != (_plain(key), digest):
                return None
            return CachedFile(path, record["notes"])
        except (OSError, ParseError, KeyError, TypeError):
            return None

    def fetch(self, key: Mapping[str, Any], suffix: str, make: Callable[[Path], Mapping[str, Any]]) -> CachedFile:
        """The file of this key; where there is no sound one, `make` writes it and returns notes.

        `make` is given a path in a private temporary folder. It is called by one process at a time for one key; when it
        raises, nothing is left behind.
        """
        found = self.find(key, suffix)
        if found is not None:
            return found
        path, record_path = self._paths(key, suffix)
        with describe_problem(self.folder), FileLock(f"{path}.lock", mode=0o600):
            found = self.find(key, suffix)
            if found is not None:
                return found
            folder = self.folder / f".making-{path.stem}"
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir(mode=0o700)
            try:
                made = folder / f"made{suffix}"
                notes = _plain(make(made))
                data = made.read_bytes()
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            record = {"key": _plain(key), "sha256": hashlib.sha256(data).hexdigest(), "notes": notes}
            for target, content in ((path, data), (record_path, json.dumps(record, indent=1).encode())):
                with open_atomic(target, overwrite=True) as file:
                    file.write(content)
        return CachedFile(path, notes)

    def compilers(self) -> Path:
        """A private folder for the caches of compilers, which they run as code too."""
        return private_folder(self.folder / "inductor")

    def _paths(self, key: Mapping[str, Any], suffix: str) -> tuple[Path, Path]:
        digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()
        name = f"{digest[:32]}{suffix}"
        return self.folder / name, self.folder / f"{name}{RECORD_SUFFIX}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back."""
    return json.loads(json.dumps(dict(values)))
