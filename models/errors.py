"""The whole error vocabulary: every message is one line that names the thing, the fault and the remedy."""

from __future__ import annotations

from pathlib import Path


class GemelError(Exception):
    """An error whose text is meant for the user; the command line prints it and exits with `exit_code`."""

    exit_code = 2


class InputError(GemelError):
    """Bad input: which file, which key, what is wrong, what to do."""

    def __init__(self, where: str | Path, fault: str, remedy: str = "", key: str = "") -> None:
        self.where, self.fault, self.remedy, self.key = str(where), fault, remedy, key
        parts = [self.where, key] if key else [self.where]
        super().__init__(": ".join([*parts, fault]) + (f"; {remedy}" if remedy else ""))


class BundleError(InputError):
    """A bundle that is refused before anything is allocated."""
