"""Files that grow by lines, for as long as a box runs: each line is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from models.files.atomic import cannot_be_written, told_of


class Lines:
    """A file that lines are added to, from any thread, each handed to the system at once.

    `fresh` empties what was there before. InputError, naming the file and the `key` that names it, where it cannot be
    opened; a pipe that nobody reads is not waited for.
    """

    def __init__(self, path: Path, fresh: bool = False, key: str = "") -> None:
        self._path, self._key, self._lock = path, key, threading.Lock()
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_TRUNC if fresh else 0)
        with told_of(path, key):
            self._descriptor: int | None = os.open(path, how, 0o666)
        os.set_blocking(self._descriptor, True)
        self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def add(self, line: str) -> None:
        """Add a line; nothing happens once the file is closed. InputError when it cannot be, as on a full disk, and
        then nothing of it is there.
        """
        with self._lock:
            if self._descriptor is None:
                return
            before = os.fstat(self._descriptor).st_size
            left = memoryview((line + "\n").encode())
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except BaseException as error:
                if self._is_regular:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, before)
                if isinstance(error, OSError):
                    raise cannot_be_written(self._path, error, self._key) from error
                raise

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                with told_of(self._path, self._key):
                    os.close(descriptor)
