"""What a command writes is apart from what it reads: told before anything is opened."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from models.errors import InputError

Named = Iterable[tuple[str, str | Path | None]]
"""What a file is, in words, or the key that names it, and where it lies; None where it is not asked for."""


def check_apart(outputs: Named, inputs: Named, where: str | Path = "") -> None:
    """Refuse an output that is one of the inputs, lies in one that is a folder, or is another output.

    Files are the same when the system says so, whatever links lead there; what does not exist yet is compared by where
    it would lie. Raises InputError naming `where` the output's key stands, if anywhere, and both files.
    """
    taken = [(name, _File.at(path)) for name, path in inputs if path is not None]
    for key, path in outputs:
        if path is None:
            continue
        mine = _File.at(path)
        if mine.is_special():  # /dev/null and pipes hold nothing that could be lost
            continue
        for name, other in taken:
            if mine.is_same(other) or other.holds(mine):
                fault = f"{path} is {name}" if mine.is_same(other) else f"{path} lies in {name}"
                remedy = "name a file that is nothing else"
                raise InputError(where or path, fault if where else fault.removeprefix(f"{path} "), remedy, key)
        taken.append((f"what '{key}' names", mine))


class _File:
    """A path that was followed to its end."""

    def __init__(self, real: Path, found: os.stat_result | None) -> None:
        self._real, self._found = real, found

    @classmethod
    def at(cls, path: str | Path) -> _File:
        found = _seen(path)
        try:
            return cls(Path(path).resolve(), found)
        except (OSError, ValueError, RuntimeError):  # links in a circle, or what is no path
            return cls(Path(path).absolute(), found)

    def is_special(self) -> bool:
        mode = stat.S_IFREG if self._found is None else self._found.st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def is_same(self, other: _File) -> bool:
        if self._found is not None and other._found is not None:
            return os.path.samestat(self._found, other._found)
        return self._real == other._real

    def holds(self, other: _File) -> bool:
        """Whether the other lies in this folder, by its path or by another name of it."""
        if self._real in other._real.parents:
            return True
        if self._found is None or other._found is None or not stat.S_ISDIR(self._found.st_mode):
            return False
        if stat.S_ISDIR(other._found.st_mode) or other._found.st_nlink < 2:
            return False
        inside = (os.path.join(root, name) for root, _, names in os.walk(self._real) for name in names)
        return any(os.path.samestat(found, other._found) for path in inside if (found := _seen(path)) is not None)


def _seen(path: str | Path) -> os.stat_result | None:
    """What the system says of a file; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path)
    return None
