"""The errors a user can cause, one line each (what, problem, hint), and bytes, times and money as text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

MAX_CHARACTERS = 400
"""Of a key, a problem or a hint, and of a path's end."""


def one_line(text: object) -> str:
    """Text in one line: controls, separators, marks of direction and lone surrogates become escapes (\\n, \\u202e).

    So nothing that came from a file can forge a line.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
    )


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a KeyboardInterrupt, or was caused by one."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        if isinstance(cause, KeyboardInterrupt):
            return True
        seen.add(id(cause))
        pending += [cause.__cause__, cause.__context__]
    return False


def join_names(names: Collection[str], max_names: int = 8) -> str:
    """`a, b, c and 12 more`."""
    hidden = len(names) - max_names
    return ", ".join(islice(names, max_names)) + (f" and {hidden} more" if hidden > 0 else "")


class GemelError(Exception):
    """An error whose text is meant for the user; the command line prints it and exits with `exit_code`."""

    exit_code = 2


def message_of(error: BaseException) -> str:
    """The text of an error in one line, with its class unless it is meant for the user."""
    return (
        str(error)
        if isinstance(error, GemelError)
        else one_line(f"{type(error).__name__}: {error}")
    )


class InputError(GemelError):
    """Bad input: which file, which key, the problem, and a hint what to do; its text is one line.

    `others` are further faults of the same input, which the command line prints below it.
    Constructed while an interrupt is handled, it raises KeyboardInterrupt: libraries turn interrupts into other errors.
    """

    def __init__(self, where: str | Path, problem: str, hint: str = "", key: str = "") -> None:
        if is_interrupt(sys.exc_info()[1]):
            raise KeyboardInterrupt
        problem, hint, key = (_clip(part) for part in (problem, hint, key))
        self.where = str(where)
        self.problem = problem
        self.hint = hint
        self.key = key
        self.others: tuple[InputError, ...] = ()
        shown = (
            self.where
            if len(self.where) <= MAX_CHARACTERS
            else f"...{self.where[-MAX_CHARACTERS:]}"
        )
        parts = [shown, key] if key else [shown]
        super().__init__(one_line(": ".join([*parts, problem]) + (f"; {hint}" if hint else "")))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str, str]]:
        return type(self), (self.where, self.problem, self.hint, self.key)


def join_errors(errors: Sequence[InputError]) -> InputError:
    """The first of these errors with all others, and theirs, as its `others`."""
    first, *following = errors
    first.others = (
        *first.others,
        *(fault for error in following for fault in (error, *error.others)),
    )
    return first


class Faults:
    """Collects the errors of several steps that do not need each other, to be raised at once."""

    def __init__(self) -> None:
        self.errors: list[InputError] = []

    def attempt(self, step: Callable[[], Value]) -> Value | None:
        """What a step returns; None where it raised InputError, which is kept."""
        try:
            return step()
        except InputError as error:
            self.errors.append(error)
            return None

    def finish(self) -> None:
        """Raise the errors as one, where there are any."""
        if self.errors:
            raise join_errors(self.errors)


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


class LockedError(InputError):
    """A file or folder that another process holds."""


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


def duration_text(seconds: float) -> str:
    """Seconds as 12 s, 3 min 05 s or 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def money_text(money: float, currency: str) -> str:
    """An amount as 1.40 usd, below one with two digits that count."""
    return f"{money:.2f} {currency}" if money >= 1 else f"{money:.2g} {currency}"


def exact_text(nbytes: int) -> str:
    """The size and, where that is rounded, the exact number: 412.3 MiB (432,345,088 bytes)."""
    return size_text(nbytes) if abs(nbytes) < 1024 else f"{size_text(nbytes)} ({nbytes:,} bytes)"
