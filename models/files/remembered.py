"""What was worked out once from plain values and this code, and is not worked out again until either is another.

Building a model on paper takes seconds for what torch's import takes alone; what comes of it is a few numbers. They are
kept as JSON in a private folder by the hash of what was asked, of every source file of this project, and of which torch
and torchvision there are. Without such a folder, or where a file there is not what was written, it is worked out anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from models.errors import InputError
from models.files.atomic import writing
from models.files.bounded import Fault
from models.files.bounded_json import parsed
from models.files.private import cache_folder, own_bytes, private_folder

MAX_KEPT = 1000
"""Files that are kept; beyond, the oldest half goes."""
MAX_BYTES = 2**25
"""Of one of them."""
PACKAGES = ("models", "edge_runtime")
LIBRARIES = ("torch", "torchvision")
ROOT = Path(__file__).resolve().parents[2]


def remembered(asked: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """What `find` finds, a JSON value, from memory where the same plain values were asked before.

    What it raises is passed on and not kept.
    """
    name = hashlib.sha256(repr((_code(), asked)).encode()).hexdigest()
    if name not in _HELD:
        folder = None
        with contextlib.suppress(InputError):
            folder = private_folder(cache_folder() / "remembered")
        _HELD[name] = _recalled(folder, name, find)
    return _HELD[name]


_HELD: dict[str, Any] = {}


def _recalled(folder: Path | None, name: str, find: Callable[[], Any]) -> Any:
    if folder is None:
        return find()
    path = folder / name
    with contextlib.suppress(OSError, Fault):
        digest, _, kept = own_bytes(path, MAX_BYTES).partition(b"\n")
        if digest == hashlib.sha256(kept).hexdigest().encode():
            return parsed(kept)
    found = find()
    kept = json.dumps(found).encode()
    with contextlib.suppress(InputError):  # a full disk
        _make_room(folder)
        with writing(path, overwrite=True) as file:
            file.write(hashlib.sha256(kept).hexdigest().encode() + b"\n" + kept)
    return found


def _make_room(folder: Path) -> None:
    files = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    if len(files) >= MAX_KEPT:
        with contextlib.suppress(OSError):  # another process may have been quicker
            for entry in sorted(files, key=lambda entry: entry.stat().st_mtime)[: len(files) // 2]:
                os.unlink(entry.path)


@functools.cache
def _code() -> str:
    """A hash of all that an answer may depend on besides the question."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is not None and spec.origin:
            yield Path(spec.origin).with_name("version.py")
