"""How a command came out, and the exit codes there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DONE, FELL_SHORT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Outcome:
    """A command's result as JSON, as text for people (`aside`: on stderr), and its exit code.

    `leaves`: once that is told the process ends, without waiting for threads that hang. `silent`: another process of
    the same command tells it.
    """

    result: dict[str, Any]
    text: str
    exit_code: int = DONE
    aside: bool = False
    leaves: bool = False
    silent: bool = False
