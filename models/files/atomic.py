"""Files that appear whole or not at all: temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from models.errors import InputError, is_interrupt

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that can be written",
}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
MAX_NAME_BYTES = 255
"""Of a file on the file systems there are."""
TEMPORARY = "..123456789012.tmp"
"""What makes a name that of a temporary file, or as long."""


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Refuse an output path that could not be written later; call it before any work is done.

    Raises InputError when the directory is missing or not writable, or when the path exists already (with
    `overwrite`: when it is a directory).
    """
    path = Path(path)
    if "\0" in str(path):
        raise InputError(path, "a path holds no NUL", "choose another path")
    parent = path.parent
    if not parent.is_dir():
        raise InputError(path, f"there is no directory {parent}", "create it, or choose another path")
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name too long, say
        raise cannot_be_written(path, error) from error
    if is_folder:
        raise InputError(path, "is a directory", "give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise InputError(path, "exists already", "move it away, or choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(path, f"the directory {parent} cannot be written", _REMEDIES[errno.EACCES])
    return path


def cannot_be_written(path: str | Path, error: OSError, key: str = "") -> InputError:
    """What the system refused while `path` was written, told of it."""
    return InputError(
        path, f"cannot be written: {error.strerror or error}", _REMEDIES.get(error.errno or 0, "check the disk"), key
    )


@contextlib.contextmanager
def told_of(path: str | Path, key: str = "") -> Iterator[None]:
    """What the system refuses in this block is an InputError of `path`, unless it names another file itself."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(error.filename or path, error, key) from error


@contextlib.contextmanager
def writing(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends well, and vanishes when it does not.

    The bytes are on the disk before the name appears. Any failure, an interruption included, leaves `path` as
    it was and removes the temporary file. Raises InputError for a full disk and everything else that stops a
    write, and KeyboardInterrupt for an interrupt, whatever the library that wrote has made of them.
    """
    path = check_output(path, overwrite)
    temporary = path.with_name(f".{within_name(path.name, TEMPORARY)}.{secrets.token_hex(6)}.tmp")
    _under_way.add(temporary)
    raw = None
    try:
        raw = _Remembering(str(temporary), "xb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, overwrite)
    except BaseException as error:
        _remove(temporary)
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        refused = raw.refused if raw is not None and raw.refused is not None else error
        if isinstance(refused, OSError) and refused.filename in (None, str(temporary)):
            raise cannot_be_written(path, refused) from error
        raise
    _under_way.discard(temporary)
    _sync_directory(path.parent)


_under_way: set[Path] = set()


def remove_torn() -> None:
    """Remove what an interrupt has left of files under way, where a second one came before the first was dealt with."""
    for temporary in list(_under_way):
        _remove(temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    _under_way.discard(temporary)


class _Remembering(io.FileIO):
    """A file that remembers why it could not be written; libraries make errors of their own of that."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.refused = error
            raise


def within_name(name: str, more: str) -> str:
    """As much of a file's name as leaves room for `more` characters."""
    return os.fsdecode(os.fsencode(name)[: MAX_NAME_BYTES - len(more)])


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the finished file its name; a file that took the name meanwhile is not overwritten."""
    if overwrite:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise InputError(path, "was created by someone else meanwhile", "choose another path") from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    """Make the new name durable; some file systems refuse to sync a directory, and then nothing more can
    be done.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
