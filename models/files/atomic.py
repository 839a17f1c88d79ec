"""Files that appear whole or not at all: temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from models.errors import InputError

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of the quota, or choose another disk",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another disk",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "choose a directory that can be written",
}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Refuse an output path that could not be written later; call it before any work is done.

    Raises InputError when the directory is missing or not writable, or when the path exists already (with
    `overwrite`: when it is a directory).
    """
    path = Path(path)
    parent = path.parent
    if not parent.is_dir():
        raise InputError(path, f"there is no directory {parent}", "create it, or choose another path")
    if path.is_dir():
        raise InputError(path, "is a directory", "give the path of a file")
    if os.path.lexists(path) and not overwrite:
        raise InputError(path, "exists already", "move it away, or choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(path, f"the directory {parent} cannot be written", _REMEDIES[errno.EACCES])
    return path


@contextlib.contextmanager
def writing(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` when the block ends well, and vanishes when it does not.

    The bytes are on the disk before the name appears. Any failure, an interruption included, leaves `path` as
    it was and removes the temporary file. Raises InputError for a full disk and everything else that stops a
    write.
    """
    path = check_output(path, overwrite)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, overwrite)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            remedy = _REMEDIES.get(error.errno or 0, "check the disk")
            raise InputError(path, f"cannot be written: {error.strerror or error}", remedy) from error
        raise
    _sync_directory(path.parent)


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
