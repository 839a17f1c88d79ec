"""The end of a file of JSON lines, as a process that was killed or a machine that lost its power leaves it.

The sink `jsonl`: each result one line of JSON, in a file or on stdout.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from edge_runtime.scheduler.costs import parse_memory
from edge_runtime.sinks.base import (
    BLOCKED,
    INVALID,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkClosed,
    SinkConfig,
    SinkKeys,
    to_delivery_error,
)
from models.errors import InputError
from models.io import AppendFile, ParseError, cannot_be_written, parse_json

MAX_TAIL_BYTES = 2**20
"""A last line longer than this is none of ours, and is left as it is."""


def repair_tail(path: Path) -> None:
    """Make the file end with the end of a line. OSError where it cannot be read or written.

    A record that was cut short is cut off, for it was never delivered; one that lacks only its newline, and text that
    is no record, are given that.
    """
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_TAIL_BYTES)
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


STDOUT = "-"
TIMEOUT_S = 1.0
"""How long a line waits for a pipe that nobody reads before it counts as trouble."""


def _size(text: str | int) -> int:
    try:
        return parse_memory(text)
    except InputError as error:
        raise ValueError(f"{error.problem}; {error.hint}") from error


class JsonLinesKeys(SinkKeys):
    """`path` is the file that lines are appended to, `-` for stdout. A file that would grow past `max_bytes` is moved
    to PATH.1 first, that to PATH.2, and so on; `keep` of those remain.
    """

    path: Annotated[str, Field(min_length=1)] = STDOUT
    max_bytes: Annotated[str | int, AfterValidator(_size)] | None = None
    keep: Annotated[int, Field(ge=0, le=1000)] = 5

    def settled(self, root: Path) -> JsonLinesConfig:
        size = None if self.max_bytes is None else int(self.max_bytes)
        return JsonLinesConfig(None if self.path == STDOUT else root / self.path, size, self.keep)


@dataclass(frozen=True, slots=True)
class JsonLinesConfig(SinkConfig):
    """The absolute path that lines are appended to, None for stdout; `max_bytes` None for a file that only grows."""

    path: Path | None
    max_bytes: int | None = None
    keep: int = 5

    @property
    def kind(self) -> str:
        return "jsonl"

    @property
    def name(self) -> str:
        return "jsonl on stdout" if self.path is None else f"jsonl {self.path}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, and those that it is moved to."""
        if self.path is None:
            return ()
        kept = 0 if self.max_bytes is None else self.keep
        return (self.path, *(rotated_path(self.path, number) for number in range(1, kept + 1)))

    def check(self) -> None:
        if self.path is None:
            if sys.stdout is None:
                raise InputError("standard output", "is closed", "give the sink a `path`")
            return
        try:
            if self.path.exists():
                os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
            else:
                tempfile.TemporaryFile(dir=self.path.parent).close()  # without a name, as a rule
        except OSError as error:
            if error.errno != errno.ENXIO:  # a pipe that nobody reads yet
                raise cannot_be_written(self.path, error) from error

    def made(self) -> Sink:
        return Stdout() if self.path is None else JsonLines(self.path, self.max_bytes, self.keep)


def rotated_path(path: Path, number: int) -> Path:
    """What a full file is called once so many have followed it."""
    return path.with_name(f"{path.name}.{number}")


class JsonLines(Sink):
    """Appends each record as one line of JSON to a file, and begins a new one where that was moved or deleted.

    What a last line that was cut short leaves is mended when the file is opened (`tail.mend`).
    """

    def __init__(self, path: Path, max_bytes: int | None = None, keep: int = 5) -> None:
        self._path, self._max_bytes, self._keep = path, max_bytes, keep
        self._lines: AppendFile | None = None

    def open(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.stat(self._path).st_mode):
                repair_tail(self._path)
        self._lines = AppendFile(self._path, timeout_s=TIMEOUT_S)

    def write(self, parcels: Sequence[ResultMessage]) -> None:
        for done, parcel in enumerate(parcels):
            line = _line(parcel, done)
            try:
                self._lines_for(len(line) + 1).add(line)
            except (InputError, OSError) as error:
                raise _missed(error, done) from error

    def tend(self) -> None:
        if self._lines is None or self._lines.is_regular:
            self._lines_for(0)

    def close(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _lines_for(self, nbytes: int) -> AppendFile:
        """The file that the next line goes to."""
        if self._lines is None or not self._lines.is_in_place:
            self.open()
        assert self._lines is not None
        size = self._lines.size if self._lines.is_regular else 0
        if self._max_bytes is not None and size and size + nbytes > self._max_bytes:
            self._rotate()
            self.open()
        return self._lines

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(rotated_path(self._path, number), rotated_path(self._path, number + 1))
        if self._keep:
            os.replace(self._path, rotated_path(self._path, 1))
        else:
            os.unlink(self._path)


class Stdout(Sink):
    """Writes each record as one line of JSON to stdout, for whoever reads what this process writes."""

    def __init__(self) -> None:
        # Not through Python's own buffer, which a line that nobody reads would hold for ever, at the end too.
        self._out, self._lines = sys.stdout, None
        with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
            self._lines = AppendFile.on(sys.stdout.fileno(), "standard output", TIMEOUT_S)

    def write(self, parcels: Sequence[ResultMessage]) -> None:
        for done, parcel in enumerate(parcels):
            line = _line(parcel, done)
            try:
                if self._lines is None:
                    self._out.write(line + "\n")
                    self._out.flush()
                else:
                    self._lines.add(line)
            except (InputError, OSError) as error:
                if isinstance(error.__cause__ or error, BrokenPipeError):
                    raise SinkClosed("nobody reads it any more") from error
                raise _missed(error, done) from error


def _line(parcel: ResultMessage, done: int) -> str:
    try:
        return parcel.text()
    except ValueError as error:
        raise DeliveryError(INVALID, f"{error}", done, for_good=True) from error


def _missed(error: Exception, done: int) -> DeliveryError:
    """What the error means; a pipe that is full stays open, since of a line that was begun the rest must follow."""
    if isinstance(error.__cause__ or error, TimeoutError):
        return DeliveryError(BLOCKED, "nobody reads what is there", done, stays_open=True)
    missed = to_delivery_error(error)
    missed.delivered = done
    return missed
