"""Notes: one line on everything that a reader chose among several, left out, shortened, scaled or converted.

A command prints each note once on stderr and returns all of them under `notes` in its JSON. A program that uses the
library gets them as warnings of the logger `gemel.notes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemel.models.errors import one_line

LOGGER = logging.getLogger("gemel.notes")
MAX_NOTES = 1000
"""Different notes that one command keeps and prints."""


def add_note(where: str | Path, text: str, hint: str = "") -> None:
    """Note what happened to a file or query, and what to do if that was not meant; one line."""
    LOGGER.warning("%s", one_line(f"{where}: {text}" + (f"; {hint}" if hint else "")))


class _Collector(logging.Handler):
    def __init__(self, on_note: Callable[[str], object]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._on_note = on_note

    def emit(self, record: logging.LogRecord) -> None:
        note = record.getMessage()
        if note not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(note)
            self._on_note(note)


@contextmanager
def collect_notes(on_note: Callable[[str], object] = lambda note: None) -> Iterator[list[str]]:
    """The notes of this block, each once, as they come; `on_note` gets each new one."""
    collector = _Collector(on_note)
    LOGGER.addHandler(collector)
    try:
        yield collector.notes
    finally:
        LOGGER.removeHandler(collector)
