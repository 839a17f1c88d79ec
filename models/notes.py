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


def add_note(where: str | Path, text: str, hint: str = "", once: str = "") -> None:
    """Note what happened to a file or query, and what to do if that was not meant; one line.

    Of the notes on one file that name a subject in `once` a command keeps the first.
    """
    subject = (str(where), once) if once else None
    LOGGER.warning(
        "%s",
        one_line(f"{where}: {text}" + (f"; {hint}" if hint else "")),
        extra={"subject": subject},
    )


class _Collector(logging.Handler):
    def __init__(self, on_note: Callable[[str], object]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._subjects = set[tuple[str, str]]()
        self._on_note = on_note

    def emit(self, record: logging.LogRecord) -> None:
        note, subject = record.getMessage(), getattr(record, "subject", None)
        if note not in self.notes and subject not in self._subjects and len(self.notes) < MAX_NOTES:
            self._subjects |= {subject} if subject else set()
            self.notes.append(note)
            self._on_note(note)


def is_collecting() -> bool:
    """Whether a block of `collect_notes` is open, whose caller shows the notes."""
    return any(isinstance(handler, _Collector) for handler in LOGGER.handlers)


@contextmanager
def collect_notes(on_note: Callable[[str], object] = lambda note: None) -> Iterator[list[str]]:
    """The notes of this block, each once, as they come; `on_note` gets each new one."""
    collector = _Collector(on_note)
    LOGGER.addHandler(collector)
    try:
        yield collector.notes
    finally:
        LOGGER.removeHandler(collector)
