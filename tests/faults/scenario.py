"""What a scenario of the fault table is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tell = Callable[[str], None]
"""Hears how far a scenario has come."""


@dataclass
class Found:
    """What a scenario saw: one sentence for the table, its figures, and a line for each thing that did not hold.

    `slow` are those that a busy machine alone can cause.
    """

    said: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def hold(self, true: object, what: str) -> None:
        """Note what is wrong unless this is true."""
        if not true:
            self.broken.append(what)

    def in_time(self, true: object, what: str) -> None:
        """Note what is wrong, or only slow, unless this is true."""
        if not true:
            self.slow.append(what)


@dataclass(frozen=True)
class Scenario:
    """One row of the fault table: the fault, what must hold, and how often it happens in full (`full`, in `unit`) and
    in the tests (`few`). `run` takes an empty folder, how often, and whom to tell.
    """

    name: str
    fault: str
    must: str
    unit: str
    full: int
    few: int
    run: Callable[[Path, int, Tell], Found]


class Missing(Exception):
    """A scenario cannot be played on this machine, for a reason that may be shown."""
