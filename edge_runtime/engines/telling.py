"""Says that something long is still at work, every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 5.0

log = logging.getLogger("gemel.run.progress")


@contextmanager
def told_while(what: str, every_s: float = INTERVAL_S) -> Iterator[None]:
    """While the context lasts, the log says every few seconds how long `what` has taken so far."""
    started, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            _say(f"{what}: {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=tell, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(text: str) -> None:
    """As `log.info`, also while a compiler is kept from logging (`models.process`), which silences everybody."""
    if log.getEffectiveLevel() <= logging.INFO:
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))
