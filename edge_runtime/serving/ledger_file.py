"""The ledger's file: what a box has done so far, written again and again while it runs, and at its end; that of the
run before is kept beside it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import InputError
from models.io import open_atomic

LEDGER_FILE, BEFORE_FILE = "ledger.json", "ledger.json.1"
INTERVAL_S = 10.0

log = logging.getLogger("gemel.run")


class LedgerFile:
    """Written in a thread of its own: a disk that hangs stops nobody. `refused` says why it could not be, if so."""

    def __init__(self, spool: Path | None, every_s: float = INTERVAL_S) -> None:
        self._path = None if spool is None else spool / LEDGER_FILE
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self.refused: str | None = None
        self._changed = threading.Condition()
        self._given: Mapping[str, Any] | None = None
        self._last = False
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    def start(self) -> None:
        """Begin; nothing is written before."""
        if self._path is not None:
            self._thread.start()

    def is_due(self) -> bool:
        """Whether it is time to write again."""
        if self._path is None or time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + self._every_s
        return True

    def write(self, summary: Mapping[str, Any], last: bool = False) -> None:
        """Have this written next; what still waits to be is not."""
        with self._changed:
            self._given, self._last = summary, last
            self._changed.notify()

    def finish(self, summary: Mapping[str, Any], timeout_s: float) -> bool:
        """Write this and no more; False where that takes too long. Nothing is written where it was not begun."""
        if self._thread.ident is None:
            return True
        self.write(summary, last=True)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        assert self._path is not None
        with contextlib.suppress(OSError):  # the first run has none before it
            os.replace(self._path, self._path.with_name(BEFORE_FILE))
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(lambda: self._given is not None)
                summary, self._given, last = self._given, None, self._last
            try:
                with open_atomic(self._path, overwrite=True) as file:
                    file.write(json.dumps(summary, indent=2).encode())
                self.refused = None
            except InputError as error:
                if self.refused is None:
                    log.error("%s", error)
                self.refused = str(error)
