"""The errors a user can cause, one line each (what, problem, hint), and sizes in bytes as text."""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import islice
from pathlib import Path

MAX_CHARACTERS = 400
"""Of a key, a fault or a remedy, and of a path's end."""


def one_line(text: object) -> str:
    """A text as it may be shown: what would end, hide or turn a line is told by its escape (\\n, \\x1b, \\u202e).

    That holds of controls, of marks of direction, of separators but the space, and of halves of characters, so that
    nothing which came from a file can forge a line.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is an interrupt, or what a library made of one."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, KeyboardInterrupt):
            return True
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
    return False


def join_names(names: Collection[str], most: int = 8) -> str:
    """Names for a line of bearable length: the first ones, and how many more there are."""
    left = len(names) - most
    return ", ".join(islice(names, most)) + (f" and {left} more" if left > 0 else "")


class GemelError(Exception):
    """An error whose text is meant for the user; the command line prints it and exits with `exit_code`."""

    exit_code = 2


def message_of(error: BaseException) -> str:
    """What an error says, in one line; of one that is not meant for the user its kind, too."""
    return str(error) if isinstance(error, GemelError) else one_line(f"{type(error).__name__}: {error}")


class InputError(GemelError):
    """Bad input: which file, which key, what is wrong, what to do; its text is one line, whatever these hold.

    Made while an interrupt is being handled, or what a library made of one, it is none: KeyboardInterrupt is raised.
    """

    def __init__(self, where: str | Path, fault: str, remedy: str = "", key: str = "") -> None:
        if is_interrupt(sys.exc_info()[1]):
            raise KeyboardInterrupt
        fault, remedy, key = (_clipped(part) for part in (fault, remedy, key))
        self.where, self.fault, self.remedy, self.key = str(where), fault, remedy, key
        shown = self.where if len(self.where) <= MAX_CHARACTERS else f"...{self.where[-MAX_CHARACTERS:]}"
        parts = [shown, key] if key else [shown]
        super().__init__(one_line(": ".join([*parts, fault]) + (f"; {remedy}" if remedy else "")))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str, str]]:
        return type(self), (self.where, self.fault, self.remedy, self.key)


def _clipped(text: str) -> str:
    """A text as long as a line bears."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


class BundleError(InputError):
    """A bundle that is refused before anything is allocated."""


_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """Bytes in powers of 1024: 412.3 MiB; below 1 KiB as bytes."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} bytes"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def exact_text(nbytes: int) -> str:
    """The size and, where that is rounded, the exact number: 412.3 MiB (432,345,088 bytes)."""
    return size_text(nbytes) if abs(nbytes) < 1024 else f"{size_text(nbytes)} ({nbytes:,} bytes)"
