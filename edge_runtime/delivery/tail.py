"""The end of a file of JSON lines, as a process that was killed or a machine that lost its power leaves it."""

from __future__ import annotations

import os
from pathlib import Path

from models.io import ParseError, parse_json

MAX_BYTES = 2**20
"""A last line longer than this is none of ours, and is left as it is."""


def mend(path: Path) -> None:
    """Make the file end with the end of a line. OSError where it cannot be read or written.

    A record that was cut short is cut off, for it was never delivered; one that lacks only its newline, and text that
    is no record, are given that.
    """
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_BYTES)
        file.seek(start)
        tail = file.read()
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if not last.strip(b"\0") or (last.startswith(b"{") and not _is_whole(last)):
            file.truncate(size - len(last))
        else:
            file.write(b"\n")


def _is_whole(record: bytes) -> bool:
    try:
        parse_json(record)
    except ParseError:
        return False
    return True
