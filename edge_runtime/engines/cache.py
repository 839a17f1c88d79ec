"""What engines make once per architecture (compiled packages, graphs, choices) and keep for the next start.

Packages are loaded as code, so the folder must be nobody else's: mode 0700, and no folder above it writable by others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import InputError
from models.files.atomic import told_of, writing

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
RECORD = ".json"
COMPILERS = "inductor"


@dataclass(frozen=True)
class Kept:
    """A file of the cache, and what its maker noted about it (JSON values)."""

    path: Path
    notes: Mapping[str, Any]


class EngineCache:
    """A private folder of files by key; whole or not at all, each made once even when processes start together.

    `folder` is `gemel/engines` in $XDG_CACHE_HOME (~/.cache unless set) if not given; it is created with mode 0700.
    Links that lead there are followed once: what was checked is what is used.
    Raises InputError when it belongs to somebody else or others may write to it, or cannot be made.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = _private(Path(folder or Path(base) / "gemel" / "engines"))

    def find(self, key: Mapping[str, Any], suffix: str) -> Kept | None:
        """What was kept under this key; None when there is nothing, or when its bytes are not what was written."""
        path = self._path(key, suffix)
        try:
            record = json.loads(_own_bytes(path.with_name(path.name + RECORD)))
            whole = record["sha256"] == hashlib.sha256(_own_bytes(path)).hexdigest() and record["key"] == _plain(key)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Kept(path, record["notes"]) if whole else None

    def fetch(self, key: Mapping[str, Any], suffix: str, make: Callable[[Path], Mapping[str, Any]]) -> Kept:
        """What is kept under this key; where there is nothing sound, `make` writes the file and returns notes.

        `make` is given a path in a private folder of its own. It is called by one process at a time for one key; what
        it raises leaves nothing behind.
        """
        found = self.find(key, suffix)
        if found is not None:
            return found
        path = self._path(key, suffix)
        with told_of(self.folder), self._alone(path):
            found = self.find(key, suffix)
            if found is not None:
                return found
            making = f".making-{path.stem}-"
            for left in self.folder.glob(f"{making}*"):  # by a process that was ended: this one alone holds the lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=making) as folder:
                made = Path(folder) / f"made{suffix}"
                notes = dict(make(made))
                data = made.read_bytes()
            record = {"key": _plain(key), "sha256": hashlib.sha256(data).hexdigest(), "notes": notes}
            with writing(path, overwrite=True) as file:
                file.write(data)
            with writing(path.with_name(path.name + RECORD), overwrite=True) as file:
                file.write(json.dumps(record, indent=1).encode())
        return Kept(path, notes)

    def compilers(self) -> Path:
        """A private folder for what compilers keep for themselves, which they run as code too."""
        return _private(self.folder / COMPILERS)

    def _path(self, key: Mapping[str, Any], suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}{suffix}"

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Hold the key's lock; the system lets go of it when a process dies."""
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _plain(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key as JSON gives it back."""
    return json.loads(json.dumps(key))


def _own_bytes(path: Path) -> bytes:
    """A file of the cache; OSError for a link, or what somebody else wrote or may write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise PermissionError(errno.EACCES, "is not this user's own", str(path))
        return file.read()


def _private(folder: Path) -> Path:
    """Where a folder really lies, made if need be, once nobody else can write to it or exchange it."""
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        opened = os.open(real.anchor, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for one in (*reversed(real.parents[:-1]), real):
                _check(folder, one.parent, os.fstat(opened), is_last=False)
                inner = os.open(one.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = inner
            found = os.fstat(opened)
            if found.st_uid == os.getuid() and not found.st_mode & WRITABLE_BY_OTHERS:
                os.fchmod(opened, PRIVATE)
            _check(folder, real, found, is_last=True)
        finally:
            os.close(opened)
    except OSError as error:
        raise InputError(
            folder, f"cannot be used as a cache: {error.strerror}", "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return real


def _check(folder: Path, one: Path, found: os.stat_result, is_last: bool) -> None:
    """Refuse a folder on the way (or the last) that others own, or may write to unless its entries keep their owner."""
    if found.st_uid not in ((os.getuid(),) if is_last else (os.getuid(), 0)):
        raise InputError(
            folder,
            f"{one} belongs to another user, and what lies there is run as code",
            "set XDG_CACHE_HOME to a folder of your own",
        )
    sticky = not is_last and found.st_mode & stat.S_ISVTX
    if found.st_mode & WRITABLE_BY_OTHERS and not sticky:
        raise InputError(
            folder,
            f"others may write to {one}, and what lies there is run as code",
            f"chmod go-w {one}, or set XDG_CACHE_HOME",
        )
