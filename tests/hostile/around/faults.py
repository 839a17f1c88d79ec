"""Faults at a touch of a folder: what Python asks of the system is announced to audit hooks, and one refuses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models import io as atomic
from models import io as lines

At = Callable[[int, bool], bool]
"""Whether to strike at the touch of this number, counted from 0, which is to change a file or not."""
CHANGES = frozenset(("os.mkdir", "os.rename", "os.link", "os.truncate", "tempfile.mkdtemp", "tempfile.mkstemp"))
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Faults:
    """Raises what `fault` makes of a path at touches of what lies in `folder`.

    Touched is what is opened, made or renamed there, and each write to a file that gemel writes. `touched` holds a path
    and whether it was to be changed, for each; `struck` says whether anything was raised. What other threads do is not
    counted: it has an order of its own.
    """

    def __init__(self, folder: Path, at: At, fault: Callable[[str], BaseException]) -> None:
        self.touched: list[tuple[str, bool]] = []
        self.struck = False
        self._folder, self._at, self._fault = str(folder), at, fault
        self._thread = threading.get_ident()

    def touch(self, path: Any, changes: bool) -> None:
        """Something touches a path."""
        if not isinstance(path, str | bytes | os.PathLike) or threading.get_ident() != self._thread:
            return
        name = os.fsdecode(path)
        if not os.path.join(os.getcwd(), name).startswith(self._folder):
            return
        self.touched.append((name, changes))
        if self._at(len(self.touched) - 1, changes):
            self.struck = True
            raise self._fault(name)


_present: Faults | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _present is None:
        return
    if event == "open":
        path, mode, flags = arguments
        changes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & WRITING_FLAGS)
        _present.touch(path, changes)
    elif event in CHANGES:
        _present.touch(arguments[0], True)


class _Whole(atomic._Remembering):
    """The file that all others are written through: its writes count, too."""

    def write(self, data: Any, /) -> int | None:
        try:
            if _present is not None:
                _present.touch(self.name, True)
        except OSError as error:
            self.refused = error
            raise
        return super().write(data)


@contextlib.contextmanager
def faults(folder: Path, at: At, fault: Callable[[str], BaseException]) -> Iterator[Faults]:
    """Strike meanwhile (see `Faults`)."""
    global _present, _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # for good: there is no way to take one back
        _hooked = True
    kept, write = atomic._Remembering, os.write

    def counted(descriptor: int, data: Any) -> int:
        if _present is not None and sys._getframe(1).f_globals is lines.__dict__:
            _present.touch(os.readlink(f"/proc/self/fd/{descriptor}"), True)
        return write(descriptor, data)

    _present, atomic._Remembering, os.write = Faults(folder, at, fault), _Whole, counted
    try:
        yield _present
    finally:
        _present, atomic._Remembering, os.write = None, kept, write
