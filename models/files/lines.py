"""Files that grow by lines, for as long as a box runs: each line is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from pathlib import Path

from models.files.atomic import cannot_be_written, told_of

PIPE_BYTES = 4096
"""A pipe that is said to have room takes so many bytes at once (PIPE_BUF of Linux)."""


class Lines:
    """A file that lines are added to, from any thread, each handed to the system at once.

    `fresh` empties what was there before. InputError, naming the file and the `key` that names it, where it cannot be
    opened; a pipe that nobody reads is not waited for: not at all to open it, and `patience_s` for each line (None:
    for ever).
    """

    def __init__(self, path: Path, fresh: bool = False, key: str = "", patience_s: float | None = None) -> None:
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_TRUNC if fresh else 0)
        with told_of(path, key):
            descriptor = os.open(path, how, 0o666)
        os.set_blocking(descriptor, True)
        self._own(descriptor, path, key, patience_s)

    @classmethod
    def on(cls, descriptor: int, name: str, patience_s: float | None = None) -> Lines:
        """Lines for what is open already; the descriptor is copied."""
        lines = cls.__new__(cls)
        lines._own(os.dup(descriptor), Path(name), "", patience_s)
        return lines

    def _own(self, descriptor: int, path: Path, key: str, patience_s: float | None) -> None:
        self._path, self._key, self._patience_s = path, key, patience_s
        self._descriptor: int | None = descriptor
        self._lock = threading.Lock()
        self._begun, self._left = b"", memoryview(b"")
        self.is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)

    @property
    def size(self) -> int:
        """Bytes in the file; 0 once it is closed."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to this file: it was not deleted, moved away or replaced."""
        try:
            return self._descriptor is not None and os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def add(self, line: str) -> None:
        """Add a line; nothing happens once the file is closed. InputError when it cannot be, as on a full disk or
        where a pipe stays full, and then nothing of it is in a file. Of what a pipe took the rest follows before
        anything else; the same line again is that line.
        """
        with self._lock:
            if self._descriptor is None:
                return
            data = (line + "\n").encode()
            try:
                if self.is_regular:
                    _write_whole(self._descriptor, data)
                else:
                    self._push(self._descriptor, data)
            except OSError as error:
                raise cannot_be_written(self._path, error, self._key) from error

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                with told_of(self._path, self._key):
                    os.close(descriptor)

    def _push(self, descriptor: int, data: bytes) -> None:
        """Write to a pipe or a device what was begun, and then this, unless it is the same."""
        ends = None if self._patience_s is None else time.monotonic() + self._patience_s
        if self._left:
            self._push_left(descriptor, ends)
            if data == self._begun:
                return
        self._begun, self._left = data, memoryview(data)
        try:
            self._push_left(descriptor, ends)
        finally:
            if len(self._left) == len(data):  # nothing of it was taken
                self._left = memoryview(b"")

    def _push_left(self, descriptor: int, ends: float | None) -> None:
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        while self._left:
            if not ready.poll(None if ends is None else max(0.0, 1000 * (ends - time.monotonic()))):
                raise TimeoutError(None, "nobody reads it")
            self._left = self._left[os.write(descriptor, self._left[:PIPE_BYTES]) :]


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write to a regular file all of it or nothing."""
    before, left = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise
