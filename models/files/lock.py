"""One process at a time writes an output; a second one is told so before it has touched anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from models.errors import InputError
from models.files.atomic import told_of, within_name

BEFORE, BEHIND = ".", ".lock"


@contextlib.contextmanager
def locked(*outputs: str | Path) -> Iterator[None]:
    """Hold the lock of each of these files while the block lasts; their folders are made where there are none.

    A lock is a file `.NAME.lock` beside the output, locked by the process (flock): the kernel lets go of it however
    the process ends, so one that was left behind holds nobody up. Folders that were made and stay empty are removed.
    A file system without locks is written to without one. Raises InputError where another process has the lock.
    """
    with contextlib.ExitStack() as held:
        for output in map(Path, outputs):
            held.enter_context(_folder(output.parent))
            held.enter_context(_lock(output))
        yield


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder that is there while the block lasts, against whoever does so, too; takes no room on its disk.

    A file system without locks is used without one. Raises InputError where another process has it.
    """
    with told_of(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            _take(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """The folder is there while the block lasts, and later if anything is in it."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        with told_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


@contextlib.contextmanager
def _lock(output: Path) -> Iterator[None]:
    path = output.with_name(BEFORE + within_name(output.name, BEFORE + BEHIND) + BEHIND)
    while (descriptor := _opened(path, output)) is None:
        pass
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who opened it meanwhile sees that it is gone
        os.close(descriptor)


def _opened(path: Path, output: Path) -> int | None:
    """The file, locked; None where another process removed it meanwhile."""
    with told_of(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    kept = False
    try:
        with contextlib.suppress(OSError):
            _take(descriptor, output)
        kept = os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:  # between the two looks at it
        kept = False
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def _take(descriptor: int, output: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fault = "is being written by another process"
        raise InputError(output, fault, "wait until that is done, or choose another path") from None
