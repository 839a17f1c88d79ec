"""Reports to an update server, in a thread of their own: nothing that a box has to do waits for a server's answer."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from gemel.edge_runtime.backoff import BackOff
from gemel.models.errors import GemelError, message_of

MAX_WAITING, MAX_TRIES = 100, 6
PAUSES = BackOff(10.0, 600.0)

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What has become of a deployment."""

    deployment: str
    is_good: bool
    text: str


class Reporter:
    """Sends reports one after the other; one that a server does not take is tried again, then dropped."""

    def __init__(self, send: Callable[[UpdateReport], None]) -> None:
        self._send = send
        self._waiting: queue.Queue[UpdateReport] = queue.Queue(MAX_WAITING)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble: str | None = None
        """Why the last report was not taken."""

    def add(self, report: UpdateReport) -> None:
        """Send a report soon; returns at once. Where too many wait, it is dropped."""
        try:
            self._waiting.put_nowait(report)
        except queue.Full:
            log.warning("update: %d reports wait for the server, another is dropped", MAX_WAITING)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="update-reports", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End after the exchange that goes on; it is not waited for."""
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            report = self._waiting.get()
            for tries in range(1, MAX_TRIES + 1):
                if self._try(report) or self._stopping.wait(PAUSES.wait_s(tries, random.random())):
                    break

    def _try(self, report: UpdateReport) -> bool:
        try:
            self._send(report)
        except (GemelError, OSError) as error:
            self.trouble = f"the server takes no report: {message_of(error)}"
            log.warning("update: %s", self.trouble)
            return False
        self.trouble = None
        return True
