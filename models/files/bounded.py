"""Files that somebody else named: regular ones alone are read, and no more of them than is bearable."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.errors import InputError
from models.sizes import size_text


class Fault(Exception):
    """Why bytes are no document, and where if that is known: line and column from 1; the reader adds which file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read_bounded(path: Path, most_bytes: int, remedy: str) -> bytes:
    """All of a regular file of at most `most_bytes`; InputError for every other, which is not waited for either."""
    with opened(path, remedy) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise InputError(path, f"is larger than {size_text(most_bytes)}", remedy)
    return data


def lines_bounded(path: Path, most_bytes: int, most_line_bytes: int, remedy: str) -> Iterator[bytes]:
    """The lines of a regular file of at most `most_bytes`, one at a time, each with its newline but perhaps the last.

    Raises InputError as `read_bounded` does, and for a longer line.
    """
    with opened(path, remedy) as file:
        number = total = 0
        while line := file.readline(most_line_bytes + 1):
            number, total = number + 1, total + len(line)
            if len(line) > most_line_bytes:
                raise InputError(path, f"line {number} is longer than {size_text(most_line_bytes)}", remedy)
            if total > most_bytes:
                raise InputError(path, f"is larger than {size_text(most_bytes)}", remedy)
            yield line


@contextmanager
def opened(path: Path, remedy: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading; InputError for every other, and for what goes wrong while it is read."""
    try:
        descriptor = _descriptor(path, remedy)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
                raise InputError(path, f"cannot be read: is {kind}", remedy)
            yield file
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}", remedy) from error


def _descriptor(path: Path, remedy: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL or half a character in the path
        raise InputError(path, f"cannot be read: {error}", remedy) from error
