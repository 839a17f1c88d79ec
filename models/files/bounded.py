"""Files that somebody else named: regular ones alone are read, and no more of them than is bearable."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from models.errors import InputError
from models.sizes import size_text


def read_bounded(path: Path, most_bytes: int, remedy: str) -> bytes:
    """All of a regular file of at most `most_bytes`; InputError for every other, which is not waited for either."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(path, f"cannot be read: is {kind}", remedy)
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", remedy) from error
    except ValueError as error:  # a NUL or half a character in the path
        raise InputError(path, f"cannot be read: {error}", remedy) from error
    if len(data) > most_bytes:
        raise InputError(path, f"is larger than {size_text(most_bytes)}", remedy)
    return data
