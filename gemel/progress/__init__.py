"""What a long command shows while it works: a live table on a terminal, sentences elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from gemel.progress.lines import Lines
from gemel.progress.live import Live

if TYPE_CHECKING:
    from merger.events import Progress

LOOK_EVERY_S = 1.0
"""How often it is looked whether nothing was said for long."""


@contextmanager
def shown_on(out: TextIO | None = None) -> Iterator[Progress]:
    """Progress on `out` (stderr when None): live on a terminal, sentences elsewhere, never silent for 10 s."""
    stream = out if out is not None else sys.stderr
    if stream.isatty():
        progress = Live(stream)
        with progress.live:
            yield progress
        return
    lines, over = Lines(stream), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            lines.beat()

    looking = threading.Thread(target=look, name="progress", daemon=True)
    looking.start()
    try:
        yield lines
    finally:
        over.set()
        looking.join()
