"""What was kept for the next time is trusted, so it must lie where nobody but this user can write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from models.errors import InputError

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where this project keeps things: `gemel` in $XDG_CACHE_HOME (~/.cache unless set); not yet made or checked.

    Raises InputError where neither that nor a home is known.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemel"
    except RuntimeError as error:
        raise InputError("HOME", "this user has no home", "set XDG_CACHE_HOME to a folder of your own") from error


def own_bytes(path: Path, most_bytes: int) -> bytes:
    """A file of the cache; OSError for a link, what somebody else wrote or may write, or what is larger."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & WRITABLE_BY_OTHERS:
            raise PermissionError(errno.EACCES, "is not this user's own", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, "is too large", str(path))
        return file.read(most_bytes)


def private_folder(folder: Path) -> Path:
    """Where a folder really lies, made if need be (mode 0700), once nobody else can write to it or exchange it.

    Links that lead there are followed once: what was checked is what is used. Raises InputError when it belongs to
    somebody else or others may write to it, or cannot be made.
    """
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
            f"{one} belongs to another user, and what lies there is trusted",
            "set XDG_CACHE_HOME to a folder of your own",
        )
    sticky = not is_last and found.st_mode & stat.S_ISVTX
    if found.st_mode & WRITABLE_BY_OTHERS and not sticky:
        raise InputError(
            folder,
            f"others may write to {one}, and what lies there is trusted",
            f"chmod go-w {one}, or set XDG_CACHE_HOME",
        )
