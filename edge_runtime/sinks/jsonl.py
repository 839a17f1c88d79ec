"""The sink `jsonl`: each result is one line of JSON, in a file or on stdout."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from pydantic import BeforeValidator, Field

from gemel.edge_runtime.scheduler.costs import parse_memory
from gemel.edge_runtime.sinks.base import (
    DeliveryError,
    ResultMessage,
    Sink,
    SinkClosed,
    SinkConfig,
    Undelivered,
    to_delivery_error,
)
from gemel.models.errors import InputError
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.io import AppendFile, cannot_be_written
from gemel.models.notes import add_note

if TYPE_CHECKING:
    from typing_extensions import Self

STDOUT = "-"
TIMEOUT_S = 1.0
"""How long a line waits for a pipe without a reader."""
MAX_TAIL_BYTES = 2**20
"""A longer last line is not a record of ours and is left as it is."""
MAX_LOOSE_BYTES = 16 * 2**20
"""Of the end of a file, which a power loss may have left with holes of zeros: more is not written in half a minute."""


def _parse_size(text: Any) -> int | None:
    try:
        return None if text is None else parse_memory(text)
    except InputError as error:
        raise ValueError(f"{error.problem}; {error.hint}") from error


def _parse_path(text: Any) -> Any:
    if text == "":
        raise ValueError("is empty")
    return None if text == STDOUT else text


class JsonLinesConfig(SinkConfig):
    """Each result is one line of JSON, in a file or on stdout.

    `path` is the file that lines are appended to, None (in YAML: `-`) for stdout. A file that would grow past
    `max_bytes` is moved to PATH.1 first, that to PATH.2, and so on; `keep` of those remain.
    """

    kind: Literal["jsonl"] = "jsonl"
    path: Annotated[Path | None, BeforeValidator(_parse_path)] = None
    max_bytes: Annotated[int | None, BeforeValidator(_parse_size)] = None
    keep: Annotated[int, Field(ge=0, le=1000)] = 5

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

    def resolve(self, root: Path, box: str | None) -> Self:
        return self.model_copy(update={"path": None if self.path is None else root / self.path})

    def check(self) -> None:
        if self.path is None and sys.stdout is None:
            raise InputError("standard output", "is closed", "give the sink a `path`")
        if self.path is not None and self.path.exists():
            try:
                os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
            except OSError as error:
                if error.errno != errno.ENXIO:  # a pipe without a reader yet
                    raise cannot_be_written(self.path, error) from error

    def build(self) -> Sink:
        return Stdout() if self.path is None else JsonLines(self.path, self.max_bytes, self.keep)


class JsonLines(Sink):
    """Appends records to a file; begins a new one when it was moved, deleted or is full."""

    def __init__(self, path: Path, max_bytes: int | None = None, keep: int = 5) -> None:
        self._path, self._max_bytes, self._keep = path, max_bytes, keep
        self._file: AppendFile | None = None

    def open(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(os.stat(self._path).st_mode):
                repair_tail(self._path)
        self._file = AppendFile(self._path, timeout_s=TIMEOUT_S)

    def write(self, messages: Sequence[ResultMessage]) -> None:
        for message in messages:
            line = message.to_text()
            try:
                self._file_for(len(line) + 1).add(line)
            except (InputError, OSError) as error:
                raise _write_error(error) from error

    def heartbeat(self) -> None:
        if self._file is None or self._file.is_regular:
            self._file_for(0)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _file_for(self, nbytes: int) -> AppendFile:
        """The file that the next `nbytes` go to."""
        if self._file is None or not self._file.is_in_place:
            self.open()
        assert self._file is not None
        size = self._file.size if self._file.is_regular else 0
        if self._max_bytes is not None and size and size + nbytes > self._max_bytes:
            self._rotate()
            self.open()
        return self._file

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(rotated_path(self._path, number), rotated_path(self._path, number + 1))
        if self._keep:
            os.replace(self._path, rotated_path(self._path, 1))
        else:
            os.unlink(self._path)


class Stdout(Sink):
    """Writes records to stdout."""

    def __init__(self) -> None:
        # Not through Python's own buffer, which would keep an unread line for ever, also at the end.
        self._out, self._file = sys.stdout, None
        with contextlib.suppress(io.UnsupportedOperation, AttributeError, ValueError):
            self._file = AppendFile(Path("standard output"), timeout_s=TIMEOUT_S, descriptor=sys.stdout.fileno())

    def write(self, messages: Sequence[ResultMessage]) -> None:
        for message in messages:
            line = message.to_text()
            try:
                if self._file is None:
                    print(line, file=self._out, flush=True)
                else:
                    self._file.add(line)
            except (InputError, OSError) as error:
                if isinstance(error.__cause__ or error, BrokenPipeError):
                    raise SinkClosed("the reader of stdout is gone") from error
                raise _write_error(error) from error


def rotated_path(path: Path, number: int) -> Path:
    """The name of a full file after `number` rotations."""
    return path.with_name(f"{path.name}.{number}")


def repair_tail(path: Path) -> None:
    """Make a file of JSON lines end with a whole record after a crash or a power loss. OSError where it cannot.

    Nothing is synced after each line, so a power loss may take the lines of the last half minute: what the system had
    not written yet is absent, or zeros. From the line of the first zero byte on all is cut off; so is a record that was
    cut: it was never delivered. A whole record without its newline, or text that is no record, gets a newline.
    """
    with open(path, "rb+") as file:
        size = _cut_holes(file, path)
        file.seek(max(0, size - MAX_TAIL_BYTES))
        tail = file.read()
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if last.startswith(b"{") and not _is_json(last):
            file.truncate(size - len(last))
            add_note(path, f"its last record of {len(last)} bytes is incomplete and cut off: it was never delivered")
        else:
            file.write(b"\n")


def _cut_holes(file: BinaryIO, path: Path) -> int:
    """Cut off what begins with a line that has a zero byte, which no record has; returns the size of the rest.

    A file that does not look like one of records is left as it is.
    """
    file.seek(0)
    first = file.read(1)
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size - MAX_LOOSE_BYTES)
    file.seek(begin)
    data = file.read()
    zero = data.find(b"\0")
    last = data.rstrip(b"\n").rpartition(b"\n")[2]
    if zero < 0 or not (first == b"{" or not data.strip(b"\0") or (last.startswith(b"{") and _is_json(last))):
        return size
    whole = begin + data.rfind(b"\n", 0, zero) + 1
    file.truncate(whole)
    add_note(path, f"its last {size - whole} bytes have holes, as after a power loss, and are cut off")
    return whole


def _is_json(record: bytes) -> bool:
    try:
        parse_json(record)
    except ParseError:
        return False
    return True


def _write_error(error: Exception) -> DeliveryError:
    """A full pipe stays open: the rest of a line that was begun must follow."""
    if isinstance(error.__cause__ or error, TimeoutError):
        return DeliveryError(Undelivered.BLOCKED, "the pipe is full and has no reader", keeps_open=True)
    return to_delivery_error(error)
